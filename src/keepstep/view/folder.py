"""A run as its folder tells: while it is written, after the job's end, and where it was copied to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from keepstep.core.errors import LayoutError, RunError
from keepstep.core.layout import ParallelLayout
from keepstep.core.process_mark import is_alive
from keepstep.core.regular_files import read_regular
from keepstep.traces import Run
from keepstep.view.incident_files import IncidentFiles
from keepstep.view.node_files import NodeFiles
from keepstep.view.samples import SampleStore
from keepstep.view.snapshot import LinkRate, NodeView, RankTable, RunEnd, RunSnapshot
from keepstep.view.status_rows import StatusRows, read_rows
from keepstep.view.step_files import Iterations
from keepstep.view.tiles import row_order

_MOST_STATUS_BYTES = 256 << 20
_MOST_BYTES = 16 << 20
_SILENT_S, _SILENT_LARGE_S = 10.0, 30.0  # without news for so long a run is silent; a large one writes rarely
_SILENT_DEAD_S = 3.0  # the same where its launcher is known to have died
_LARGE = 1024  # nodes
_SHARE = 0.04  # of the time that reading ``status.json`` may take
_HISTORY_S, _LOOK_S = 0.25, 0.02  # spent on nodes' folders in a look: in the first round, and later
_INCIDENTS_S = 0.25


@dataclass(frozen=True, slots=True)
class Times:
    """The clocks of a source, which tests set: seconds that only grow, and Unix seconds."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


class JsonFile:
    """A file that is read again when it has changed. What was read last stays where it cannot be read."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._most = path, most_bytes
        self._mark: tuple[int, int, int] | None = None
        self.trouble = ""

    def changed(self) -> bytes | None:
        """The content, if it is another than at the last call; None where it is not, or cannot be read."""
        try:
            told = os.stat(self._path)
            mark = told.st_mtime_ns, told.st_size, told.st_ino
            if mark == self._mark:
                return None
            content = read_regular(self._path, self._most)
        except FileNotFoundError:
            self.trouble = ""
            return None
        except OSError as error:
            self.trouble = f"{self._path}: cannot be read: {error.strerror}"
            return None
        self._mark, self.trouble = mark, ""
        return content

    def cannot_be_read(self, why: object) -> None:
        """Remember that the content is not what keepstep writes."""
        self.trouble = f"{self._path}: not what keepstep writes ({why}); the file was cut or edited"


class FolderSource:
    """A run's folder, looked at again and again. Not for several threads at once.

    A look takes a fraction of a second: what is read of a long run and of large ones comes in the looks that follow
    (`is_whole`). Of what is very long evenly spaced parts are read.
    """

    def __init__(self, run: Run, times: Times | None = None) -> None:
        self._run, self._times = run, times or Times()
        clock = self._times.monotonic
        self.samples = SampleStore()
        self._described = JsonFile(run.path / "run.json", _MOST_BYTES)
        self._ended = JsonFile(run.path / "end.json", _MOST_BYTES)
        self._status_file = JsonFile(run.path / "status.json", _MOST_STATUS_BYTES)
        self._incidents = IncidentFiles(run.path / "incidents", clock)
        self._nodes = NodeFiles(run.path / "nodes", self._take_iterations, clock)
        self._about: dict[str, Any] = {}
        self._end: RunEnd | None = None
        self._status: StatusRows | None = None
        self._ranks: RankTable | None = None
        self._changed_s: float | None = None  # when the status was seen to change
        self._first_s = clock()
        self._next_status_s = 0.0
        self._views: tuple[object, tuple[NodeView, ...], tuple[LinkRate, ...]] | None = None
        self._layout: ParallelLayout | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all that is there has been looked at once: before, samples and incidents are still read."""
        return self._nodes.rounds > 0 and self._incidents.is_whole

    def refresh(self) -> RunSnapshot:
        """Look again. What cannot be read is told in ``troubles`` of the snapshot, and the rest is shown."""
        self._read_small_files()
        self._read_status()
        self._incidents.look(_INCIDENTS_S)
        self._nodes.look(_LOOK_S if self._nodes.rounds else _HISTORY_S)
        self._arrange()
        return self._snapshot()

    def read_all(self) -> RunSnapshot:
        """Look until all that is there was read once: for a page that is written once."""
        snapshot = self.refresh()
        while not self.is_whole:
            snapshot = self.refresh()
        return snapshot

    def close(self) -> None:
        """Nothing is kept open."""

    @property
    def history(self) -> NodeFiles:
        """What the nodes' folders tell, for a source that has the rest from elsewhere."""
        return self._nodes

    def _read_small_files(self) -> None:
        if (content := self._described.changed()) is not None:
            self._about = _table(self._described, content) or self._about
            self._layout = _layout(self._about)
        if (content := self._ended.changed()) is not None:
            ended = _table(self._ended, content)
            if ended:
                self._end = RunEnd(
                    _int(ended.get("exit_code")), str(ended.get("category", "")), str(ended.get("reason", ""))
                )

    def _read_status(self) -> None:
        now_s = self._times.monotonic()
        if now_s < self._next_status_s:
            return
        content = self._status_file.changed()
        if content is None:
            return
        began_s = time.process_time()
        try:
            status, ranks = read_rows(content)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            self._status_file.cannot_be_read(error)
            return
        if self._status is not None and status.unix_s != self._status.unix_s:
            self._changed_s = now_s
        self._status, self._ranks = status, ranks
        self._take_beats(status, ranks)
        self._next_status_s = now_s + (time.process_time() - began_s) / _SHARE

    def _take_beats(self, status: StatusRows, ranks: RankTable) -> None:
        self.samples.reserve(status.world_size)
        take_beats(self.samples, ranks, status.incarnation, status.unix_s)

    def _take_iterations(self, found: Iterations) -> None:
        self.samples.reserve(self._world_size())
        self.samples.take(
            found.rank, found.step, found.own_s, found.iteration_s, found.incarnation, found.start_unix_s
        )

    def _world_size(self) -> int:
        return (self._status.world_size if self._status else 0) or _int(self._about.get("world_size"))

    def _arrange(self) -> None:
        world_size = self._world_size()
        if world_size and world_size <= 1 << 20:
            self.samples.arrange(row_order(world_size, self._layout))

    def _age_s(self, status: StatusRows) -> float:
        """How old the status is. Clocks differ: once it was seen to change, only this one's counts."""
        now_s = self._times.monotonic()
        if self._changed_s is not None:
            return max(now_s - self._changed_s, 0.0)
        return max(self._times.unix() - status.unix_s, now_s - self._first_s, 0.0)

    def _snapshot(self) -> RunSnapshot:
        status = self._status or StatusRows(self._times.unix())
        age_s = self._age_s(status) if self._status is not None else 0.0
        state, state_s = self._state(status, age_s)
        nodes, links = self._node_views(status)
        backups = status.backups
        return RunSnapshot(
            name=str(self._about.get("id") or self._run.path.resolve().name),
            unix_s=status.unix_s,
            age_s=0.0 if self._end is not None or age_s < _SILENT_DEAD_S else age_s,
            state=state,
            state_s=state_s,
            end=self._end,
            world_size=self._world_size(),
            most_nodes=status.most_nodes or _int(self._about.get("nodes")),
            newest_step=status.newest_step,
            incarnation=status.incarnation,
            restarts=status.restarts,
            max_restarts=status.max_restarts,
            started_unix_s=_float(self._about.get("started_unix_s")),
            layout=self._layout,
            nodes=nodes,
            spares=status.spares,
            ranks=self._ranks,
            incidents=self._incidents.incidents,
            links=links,
            has_checkpoints=has_checkpoints(nodes),
            backup_trouble=backups.trouble if backups else "",
            troubles=tuple(self._troubles()),
        )

    def _state(self, status: StatusRows, age_s: float) -> tuple[str, float]:
        if self._end is not None:
            return "ended", status.state_s
        if self._status is None:
            return "", 0.0
        silent_s = _SILENT_LARGE_S if len(status.nodes) > _LARGE else _SILENT_S
        if self._launcher_died():
            silent_s = _SILENT_DEAD_S
        return ("silent", age_s) if age_s >= silent_s else (status.state, status.state_s)

    def _launcher_died(self) -> bool:
        return self._about.get("host") == os.uname().nodename and not is_alive(self._about.get("launcher"))

    def _node_views(self, status: StatusRows) -> tuple[tuple[NodeView, ...], tuple[LinkRate, ...]]:
        key = (status, self._nodes.version)
        if self._views is None or self._views[0] != key:
            nodes = tuple(_node_view(row, status, self._nodes) for row in status.nodes)
            self._views = key, nodes, ()
        return self._views[1], self._views[2]

    def _troubles(self) -> list[str]:
        files = (self._described, self._ended, self._status_file)
        lines = [one.trouble for one in files if one.trouble]
        return lines + self._incidents.troubles + self._nodes.troubles


def take_beats(samples: SampleStore, ranks: RankTable, incarnation: int, unix_s: float) -> None:
    """Take the newest iteration of each rank that has made one."""
    begun = unix_s - ranks.idle_s.astype("f8") - ranks.iteration_s
    samples.take(ranks.rank, ranks.step, ranks.self_s, ranks.iteration_s, incarnation, begun)


def has_checkpoints(nodes: tuple[NodeView, ...]) -> bool:
    """Whether any node has a snapshot, in a memory or on storage."""
    return any(max(one.sealed_step, one.backed_up_step, one.stored_step) >= 0 for one in nodes)


def _node_view(row: Any, status: StatusRows, files: NodeFiles) -> NodeView:
    folder = files.nodes.get(row.node_rank)
    told = folder.checkpoints if folder else None
    backed_up = status.backups.step if status.backups else -1
    stored = told.newest if told and told.newest is not None else -1
    return NodeView(
        node_rank=row.node_rank,
        name=row.node,
        agent=row.agent,
        launcher=row.launcher,
        heard_s_ago=row.heard_s_ago,
        notices=row.notices,
        sealed_step=max(row.sealed_step, backed_up),
        backed_up_step=backed_up if row.backed_up_step is None else row.backed_up_step,
        stored_step=stored if row.stored_step is None else row.stored_step,
        storage_troubles=row.storage_troubles or (told.troubles if told else ()),
    )


def _layout(about: dict[str, Any]) -> ParallelLayout | None:
    try:
        return ParallelLayout.declared(str(about["layout"])) if about.get("layout") else None
    except LayoutError:
        return None


def _table(file: JsonFile, content: bytes) -> dict[str, Any] | None:
    try:
        return cast("dict[str, Any]", msgspec.json.decode(content, type=dict[str, Any]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        file.cannot_be_read(error)
        return None


def _int(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _float(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def open_folder(path: str | Path) -> FolderSource:
    """The run in this folder, or of this name under ``./runs``. Raises RunError where there is none."""
    return FolderSource(_found(Path(path)))


def _found(path: Path) -> Run:
    for candidate in (path, Path("runs") / path):
        if (candidate / "run.json").is_file():
            return Run(candidate)
    raise RunError(f"{path}: no run folder (no run.json in it)")
