"""A run as its folder tells: while it is written, after the job's end, and where it was copied to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from keepstep.core.errors import LayoutError
from keepstep.core.layout import ParallelLayout
from keepstep.core.process_mark import is_alive
from keepstep.core.regular_files import read_regular
from keepstep.traces import Run
from keepstep.traces.runs import RANKS_FILE
from keepstep.view.beats import BeatIntake
from keepstep.view.follower import LiveView
from keepstep.view.incident_files import IncidentFiles
from keepstep.view.node_files import NodeFiles
from keepstep.view.node_links import links_between
from keepstep.view.run_snapshot import LinkRate, NodeView, RankTable, RunEnd, RunSnapshot
from keepstep.view.samples import MOST_RANKS, SampleStore
from keepstep.view.status_rows import StatusRows, node_view, read_rank_rows, read_status
from keepstep.view.step_files import Iterations, joined
from keepstep.view.tiles import row_order

_MOST_STATUS_BYTES = 64 << 20  # several times that of 131,072 ranks
_MOST_BYTES = 16 << 20
_SILENT_S, _SILENT_LARGE_S = 10.0, 30.0  # without news for so long a run is silent; a large one writes rarely
_SILENT_DEAD_S = 3.0  # the same where its launcher is known to have died
_LARGE = 1024  # nodes
_SHARE = 0.04  # of the time that reading what is large may take
_CHEAP_S = 0.02  # what takes no longer is done at each look
_HISTORY_S, _LOOK_S = 0.25, 0.02  # spent on nodes' folders in a look: while much is to be read, and later
_LONG_S = 10.0  # after so long without a look much is to be read again
_INCIDENTS_S = 0.25
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


@dataclass(frozen=True, slots=True)
class Times:
    """The clocks of a source, which tests set: seconds that only grow, and Unix seconds."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


class ChangingFile:
    """A file that is read again when it has changed."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._most = path, most_bytes
        self._mark: tuple[int, int, int] | None = None
        self.trouble = ""

    def news(self) -> bytes | None:
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

    def table(self) -> dict[str, Any] | None:
        """The same of a file with a JSON object."""
        content = self.news()
        try:
            return None if content is None else msgspec.json.decode(content, type=dict[str, Any])
        except _UNREADABLE as error:
            self.is_unreadable(error)
            return None

    def is_unreadable(self, why: object) -> None:
        """Note that the content is not what keepstep writes."""
        self.trouble = f"{self._path}: not what keepstep writes ({why}); the file was cut or edited"


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """What the run's controller has answered, and the status in it."""

    view: LiveView
    status: StatusRows


@dataclass(slots=True)
class _Known:
    """What was read last, and stays where a later file cannot be read."""

    about: dict[str, Any]  # content of run.json
    status: StatusRows | None = None
    ranks: RankTable | None = None
    layout: ParallelLayout | None = None
    end: RunEnd | None = None
    ended_unix_s: float = 0.0
    nodes: tuple[NodeView, ...] = ()
    links: tuple[LinkRate, ...] = ()


class FolderSource:
    """A run's folder, looked at again and again. Not for several threads at once.

    A look takes a fraction of a second: what is read of a long run, or of a large one, comes in the looks that follow
    (`is_whole`). Of what is very long evenly spaced parts are read.
    """

    def __init__(self, run: Run, times: Times | None = None) -> None:
        self._run, self._times = run, times or Times()
        clock, path = self._times.monotonic, run.path
        self.samples = SampleStore()
        self._files = {
            name: ChangingFile(path / name, most)
            for name, most in (
                ("run.json", _MOST_BYTES),
                ("end.json", _MOST_BYTES),
                ("status.json", _MOST_STATUS_BYTES),
                (RANKS_FILE, _MOST_STATUS_BYTES),
            )
        }
        self._beats = BeatIntake(self.samples)
        self._incidents = IncidentFiles(path / "incidents", clock)
        self._read_iterations: list[Iterations] = []  # in this look
        self._nodes = NodeFiles(path / "nodes", self._read_iterations.append, clock)
        self._known = _Known({})
        self._told: Told | None = None
        self._changed_s: float | None = None  # when the status was seen to change
        self._first_s = clock()
        self._looked_s, self._rounds_behind = (
            self._first_s,
            1,
        )  # rounds over the nodes in which much is to be read
        self._next_status_s = self._next_nodes_s = 0.0
        self._shown: tuple[object, ...] = ()  # of what the views of nodes and links were made

    @property
    def is_whole(self) -> bool:
        """Whether all that is there has been looked at once: before, samples and incidents are still read."""
        return self._nodes.rounds > 0 and self._incidents.is_whole

    def has_ended(self) -> bool:
        """Whether the folder says by now that the run has ended."""
        self._read_small_files()
        return self._known.end is not None

    def refresh(self, told: Told | None = None) -> RunSnapshot:
        """Look again. What cannot be read is told in ``troubles`` of the snapshot, and the rest is shown.

        ``told``: what the run's controller has answered last; the status in the folder is not read then.
        """
        self._read_small_files()
        if told is None:
            self._read_status()
        elif told is not self._told:
            self._take_told(told)
        self._told = told
        self._incidents.look(_INCIDENTS_S)
        self._look_at_nodes()
        self._take_iterations()
        self._arrange()
        self._view_nodes(told)
        return self._snapshot()

    def read_all(self) -> RunSnapshot:
        """Look until all that is there was read once, as for a page that is written once."""
        snapshot = self.refresh()
        while not self.is_whole:
            snapshot = self.refresh()
        return snapshot

    def close(self) -> None:
        """Nothing is kept open."""

    def _look_at_nodes(self) -> None:
        """Read on in the nodes' folders. A round may be under way when much has come: the next one reads the rest."""
        now_s = self._times.monotonic()
        if now_s - self._looked_s > _LONG_S:
            self._rounds_behind = self._nodes.rounds + 2
        self._looked_s = now_s
        if self._nodes.rounds >= self._rounds_behind:
            self._nodes.look(_LOOK_S)
        while (
            self._nodes.rounds < self._rounds_behind
            and (left_s := now_s + _HISTORY_S - self._times.monotonic()) > 0
        ):
            self._nodes.look(left_s)

    def _read_small_files(self) -> None:
        known = self._known
        if (about := self._files["run.json"].table()) is not None:
            known.about, known.layout = about, _layout(about.get("layout"))
        if (ended := self._files["end.json"].table()) is not None:
            category, reason = (str(ended.get(name, "")) for name in ("category", "reason"))
            known.end = RunEnd(_int(ended.get("exit_code")), category, reason)
            known.ended_unix_s = _float(ended.get("ended_unix_s"))

    def _read_status(self) -> None:
        now_s = self._times.monotonic()
        if now_s < self._next_status_s:
            return
        began_s = time.thread_time()
        file, rows = self._files["status.json"], self._files[RANKS_FILE]
        content = file.news()
        if content is None:
            return
        try:
            status, ranks = read_status(content)
        except _UNREADABLE as error:
            file.is_unreadable(error)
            return
        known = self._known
        if known.status is not None and status.unix_s != known.status.unix_s:
            self._changed_s = now_s
        known.status = status
        if ranks is None and (content := rows.news()) is not None:
            try:
                ranks = read_rank_rows(content)
            except _UNREADABLE as error:
                rows.is_unreadable(error)
        if ranks is not None:
            self._take_ranks(ranks)
        self._next_status_s = now_s + pause_s(time.thread_time() - began_s)

    def _take_told(self, told: Told) -> None:
        self._known.status = told.status
        self._known.layout = told.view.layout or self._known.layout
        self._changed_s = self._times.monotonic()
        self._incidents.take(told.view.incidents)
        self._take_ranks(told.view.ranks)

    def _take_ranks(self, ranks: RankTable) -> None:
        status = self._known.status
        assert status is not None
        self._known.ranks = ranks
        self.samples.reserve(status.world_size)
        self._beats.take(ranks, status.incarnation, status.unix_s)

    def _take_iterations(self) -> None:
        """Take what was read of all nodes at once, which is many times faster than one after another."""
        self.samples.reserve(self._world_size())
        for found in joined(self._read_iterations):
            self.samples.take(
                found.rank, found.step, found.own_s, found.iteration_s, found.incarnation, found.start_unix_s
            )
        self._read_iterations.clear()

    def _world_size(self) -> int:
        status = self._known.status
        return (status.world_size if status else 0) or _int(self._known.about.get("world_size"))

    def _arrange(self) -> None:
        if 0 < (world_size := self._world_size()) <= MOST_RANKS:
            self.samples.arrange(row_order(world_size, self._known.layout))

    def _view_nodes(self, told: Told | None) -> None:
        """Make the views of nodes and links anew where they have changed; of many nodes not at each look."""
        known, now_s = self._known, self._times.monotonic()
        if told is not None:
            known.links = told.view.links
        status, shown = known.status, (known.status, self._nodes.version)
        if status is None or shown == self._shown or now_s < self._next_nodes_s:
            return
        began_s = time.thread_time()
        folders = self._nodes.nodes
        known.nodes = tuple(
            node_view(row, status, folder.checkpoints if (folder := folders.get(row.node_rank)) else None)
            for row in status.nodes
        )
        if told is None:
            known.links = links_between(self._nodes.paths(), known.ranks)
        self._shown = shown
        self._next_nodes_s = now_s + pause_s(time.thread_time() - began_s)

    def _snapshot(self) -> RunSnapshot:
        known, about = self._known, self._known.about
        status = known.status or StatusRows(self._times.unix())
        incidents = self._incidents.incidents
        state, state_s, age_s = self._state(status)
        return RunSnapshot(
            name=str(about.get("id") or self._run.path.resolve().name),
            folder=str(self._run.path.absolute()),
            unix_s=status.unix_s,
            age_s=age_s,
            state=state,
            state_s=state_s,
            end=known.end,
            world_size=self._world_size(),
            most_nodes=status.most_nodes or _int(about.get("nodes")),
            newest_step=status.newest_step,
            incarnation=status.incarnation,
            restarts=status.restarts,
            max_restarts=status.max_restarts,
            started_unix_s=_float(about.get("started_unix_s")),
            layout=known.layout,
            nodes=known.nodes,
            spares=status.spares,
            ranks=known.ranks,
            incidents=incidents,
            unread_open=tuple(set(status.open_incidents).difference(one.number for one in incidents))
            if status.open_incidents
            else (),
            links=known.links,
            has_checkpoints=any(
                max(node.sealed_step, node.backed_up_step, node.stored_step) >= 0 for node in known.nodes
            ),
            backup_trouble=status.backups.trouble if status.backups else "",
            unwatched_since_unix_s=status.unwatched_since_unix_s,
            thresholds=status.thresholds,
            troubles=(
                *(one.trouble for one in self._files.values() if one.trouble),
                *self._incidents.troubles,
                *self._nodes.troubles,
            ),
        )

    def _state(self, status: StatusRows) -> tuple[str, float, float]:
        """State, for how many seconds, and how old the status is where it is so old that this has to be told."""
        known = self._known
        if known.end is not None:
            return (
                "ended",
                max(self._times.unix() - known.ended_unix_s, 0.0) if known.ended_unix_s else 0.0,
                0.0,
            )
        if known.status is None:
            return "", 0.0, 0.0
        age_s = self._age_s(status)
        silent_s = _SILENT_LARGE_S if len(status.nodes) > _LARGE else _SILENT_S
        if self._launcher_has_died():
            silent_s = _SILENT_DEAD_S
        return ("silent", age_s, age_s) if age_s >= silent_s else (status.state, status.state_s, 0.0)

    def _age_s(self, status: StatusRows) -> float:
        """How old the status is. Clocks differ: once it was seen to change, only this one's counts."""
        now_s = self._times.monotonic()
        if self._changed_s is not None:
            return now_s - self._changed_s
        return max(self._times.unix() - status.unix_s, now_s - self._first_s)

    def _launcher_has_died(self) -> bool:
        about = self._known.about
        return about.get("host") == os.uname().nodename and not is_alive(about.get("launcher"))


def pause_s(cost_s: float) -> float:
    """How long to wait after something that took so many seconds of CPU, before it is done again."""
    return cost_s / _SHARE if cost_s > _CHEAP_S else 0.0


def _layout(text: object) -> ParallelLayout | None:
    try:
        found = ParallelLayout.declared(str(text)) if text else None
    except (LayoutError, ValueError):
        return None
    return found if found is None or found.world_size <= MOST_RANKS else None  # its groups are counted out


def _int(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _float(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
