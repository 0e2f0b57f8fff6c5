"""Follows the folders of a run's nodes: iterations, checkpoints and links, a little at each look."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from keepstep.core.regular_files import read_regular
from keepstep.view.node_links import PATHS_FILE, read_paths
from keepstep.view.status_rows import CheckpointState
from keepstep.view.step_files import Iterations, SeenFile, StepFiles, files_of_iterations
from keepstep.wire.messages import PathRate

_MOST_JSON_BYTES = 4 << 20
_ALL_BYTES = (
    64 << 20
)  # of iterations that one round over all nodes reads, as far as that leaves each node enough
_LEAST_BYTES = 16 << 10
_MOST_PATHS = 1 << 16
_MOST_TROUBLES = 3  # nodes whose troubles are told one by one


@dataclass(slots=True)
class NodeFolder:
    """What is known of one node from its folder."""

    steps: StepFiles = field(default_factory=StepFiles)
    checkpoints: CheckpointState | None = None
    paths: tuple[PathRate, ...] = ()
    marks: dict[str, tuple[int, int, int]] = field(default_factory=dict[str, tuple[int, int, int]])
    trouble: str = ""


class NodeFiles:
    """The folders under ``RUN/nodes``. ``sink`` gets the iterations that are read."""

    def __init__(
        self,
        folder: Path,
        sink: Callable[[Iterations], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._sink, self._clock = folder, sink, clock
        self.nodes: dict[int, NodeFolder] = {}
        self.version = 0  # grows when checkpoints or links have changed
        self.rounds = 0  # how often all folders have been looked at
        self._round: Iterator[None] | None = None
        self._trouble = ""
        self._paths, self._is_short_of_paths = 0, False

    @property
    def troubles(self) -> list[str]:
        """What could not be read, a line each."""
        lines = [self._trouble] if self._trouble else []
        told = [node.trouble for _, node in sorted(self.nodes.items()) if node.trouble]
        lines += told[:_MOST_TROUBLES]
        if len(told) > _MOST_TROUBLES:
            lines.append(f"files of {len(told) - _MOST_TROUBLES} more nodes cannot be read")
        broken = sum(node.steps.broken for node in self.nodes.values())
        if broken:
            lines.append(f"{self._folder}: {broken} lines of iterations.jsonl cannot be read")
        if self._is_short_of_paths:
            lines.append(f"links of some nodes are not shown: there are more than {_MOST_PATHS:,}")
        return lines

    def look(self, budget_s: float) -> None:
        """Go on with the round over all nodes for about so many seconds; no further than to its end."""
        until_s = self._clock() + budget_s
        if self._round is None:
            self._round = self._look_at_all()
        for _ in self._round:
            if self._clock() >= until_s:
                return
        self._round = None
        self.rounds += 1

    def _look_at_all(self) -> Iterator[None]:
        try:
            with os.scandir(self._folder) as entries:
                numbers = [int(one.name) for one in entries if one.name.isascii() and one.name.isdigit()]
            self._trouble = ""
        except FileNotFoundError:
            return
        except OSError as error:
            self._trouble = f"{self._folder}: cannot be read: {error.strerror}"
            return
        most_bytes = max(_ALL_BYTES // max(len(numbers), 1), _LEAST_BYTES)
        for number in sorted(numbers):
            node = self.nodes.setdefault(number, NodeFolder())
            try:
                yield from self._look_at(node, self._folder / str(number), most_bytes)
                node.trouble = ""
            except OSError as error:
                node.trouble = (
                    f"{error.filename or self._folder / str(number)}: cannot be read: {error.strerror}"
                )
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                node.trouble = f"{self._folder / str(number)}: a file is not what keepstep writes: {error}"
            yield

    def _look_at(self, node: NodeFolder, folder: Path, most_bytes: int) -> Iterator[None]:
        seen: dict[str, SeenFile] = {}
        marks: dict[str, tuple[int, int, int]] = {}
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".json") or entry.name.startswith("iterations"):
                    told = entry.stat()
                    seen[entry.name] = SeenFile(folder / entry.name, told.st_ino, told.st_size)
                    marks[entry.name] = told.st_mtime_ns, told.st_size, told.st_ino
        for name, read in _READERS.items():
            if name in marks and marks[name] != node.marks.get(name):
                node.marks[name], before = marks[name], len(node.paths)
                read(node, folder / name)
                self._keep_paths(node, before)
                self.version += 1
        files = files_of_iterations(seen)
        if node.steps.has_news(files):
            for found in node.steps.read(files, most_bytes):
                for one in found:
                    self._sink(one)
                yield

    def paths(self) -> dict[int, tuple[PathRate, ...]]:
        """What nodes sent each other, by node rank."""
        return {number: node.paths for number, node in sorted(self.nodes.items()) if node.paths}

    def _keep_paths(self, node: NodeFolder, before: int) -> None:
        """Keep no more paths than fit into memory: a picture of so many nodes cannot be looked at anyway."""
        self._paths -= before
        if self._paths + len(node.paths) > _MOST_PATHS:
            node.paths, self._is_short_of_paths = (), True
        self._paths += len(node.paths)


def _read_checkpoints(node: NodeFolder, path: Path) -> None:
    node.checkpoints = msgspec.json.decode(read_regular(path, _MOST_JSON_BYTES), type=CheckpointState)


def _read_links(node: NodeFolder, path: Path) -> None:
    node.paths = read_paths(path)


_READERS: dict[str, Callable[[NodeFolder, Path], None]] = {
    "checkpoints.json": _read_checkpoints,
    PATHS_FILE: _read_links,
}
