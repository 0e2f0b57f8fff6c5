"""Follows one rank: it turns batches of ring records into summaries, findings and the rank's part of a heartbeat."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from keepstep.agent.ranks.clocks import ClockSampler
from keepstep.agent.ranks.cut import Cut
from keepstep.agent.ranks.device_calls import has_device_groups
from keepstep.agent.ranks.device_times import DeviceTimes
from keepstep.agent.ranks.event_buffer import Rows, chosen, joined
from keepstep.agent.ranks.iterations import IterationCutter, Told
from keepstep.agent.ranks.records import outline
from keepstep.agent.ranks.summarise import blocked, blocks_of, summarise
from keepstep.agent.ranks.watch import PHASES, RankWatch
from keepstep.core.events import Flag, Kind, Phase
from keepstep.core.finding import Finding
from keepstep.core.summary import BlockSummary, DeviceCalls, GroupInfo, IterationSummary

HISTORY = 256
_CUTS = 24
_CUTS_COMPARED = 2  # latest iterations whose operations are usual
USUAL = ["kind", "op", "group", "site"]  # fields by which operations of different iterations are the same
_CUT_ROWS = 32_768  # most records kept with iterations, about 2 MiB
_SEARCH_NS = 300_000_000
_FRESH_S = 5.0  # for so long it stands what a device was told to have ended; it is asked every two seconds
_PHASE = int(Kind.PHASE)
_FAILED = int(Flag.FAILED)
_MOST_FAILED = 64
_ENDS = {"relief": "slow", "resumed": "hang"}  # by the kind of a finding, the kind that it ends
_SHORT_PHASES = (int(Phase.DATA), int(Phase.OPTIMIZER))
# Longer data and optimizer phases have been reported as hangs or are learned as pauses.
_LONGEST_SHORT_S = 30.0


@dataclass(slots=True)
class Taken:
    """Iterations, each with how many were taken together, and findings that one batch of records led to."""

    iterations: list[tuple[IterationSummary, int]] = field(default_factory=list[tuple[IterationSummary, int]])
    findings: list[Finding] = field(default_factory=list[Finding])


@dataclass(frozen=True, slots=True)
class _DeviceTold:
    """What was told of a rank's device when the rank had made this progress.

    Attributes:
        waits: whether it had calls to finish.
        still_s: for how long it had ended none; infinite where that is not known.
        at_ns: when that was told.
    """

    progress: int
    waits: bool
    still_s: float
    at_ns: int

    def still_at(self, now_ns: int) -> float:
        """For how long the device has ended nothing, in seconds: as it was told, for as long as that is fresh."""
        if not self.waits:
            return math.inf
        ago_s = (now_ns - self.at_ns) * 1e-9
        return self.still_s + (ago_s if ago_s > _FRESH_S else 0.0)


class RankTrack:
    """One incarnation of one rank, without any I/O.

    Attributes:
        cutter: cuts the rank's records into iterations, and knows its step, phase and micro-batch.
        watch: makes findings of the iterations and of the rank's progress.
        thread: the thread that made the latest record; 0 before the first.
        waiting: whether the rank makes no progress because it is blocked in an operation.
        together: how many iterations were cut together last.
        steps: how many iterations it has made since this agent has followed it.
        standing: the findings that still hold, by kind.
        device: iterations as the rank's GPU has them, where they are measured.
        failed: the latest operations that ended with an error, and after which none was entered that ended well.
    """

    def __init__(self, rank: int, node: str, local: Collection[int], records: int = 65536) -> None:
        self.rank = rank
        self.progress = 0
        self.thread = 0
        self.last_progress_ns = 0
        self.lost = 0
        self.groups: list[GroupInfo] = []
        self._history: deque[IterationSummary] = deque(maxlen=HISTORY)  # iterations that were cut singly
        self.latest: IterationSummary | None = None
        self.steps = 0
        self.together = 1
        self.standing: dict[str, Finding] = {}
        self.failed: Rows | None = None
        self.clock = ClockSampler(rank, local)
        self.cutter = IterationCutter(records)
        self._cuts: deque[Cut] = deque()  # the latest iterations with their records
        self._cut_rows = self._cut_steps = 0  # how many records and iterations they have
        self.device = DeviceTimes()
        self._on_device = False  # the iterations that count are the GPU's
        self.watch = RankWatch(rank, node)
        self._names: dict[int, str] = {}
        self._numbered: dict[int, GroupInfo] = {}
        self._waiting_groups: frozenset[int] = frozenset()  # those in whose operations the host waits
        self._renumbered = 0
        self._caught_up = False
        self._progress_then = 0
        self.waiting = False
        self._has_device = self._unseen = False  # two facts: it has groups of a device; its waits are unseen
        self._device_told: _DeviceTold | None = None
        self._measured_ns = 0  # when the shim last told that the GPU has done something; 0: never
        self._next_search_ns = 0

    def phase(self) -> tuple[int, int]:
        """The rank's phase as far as it is evident, and since when in ns: else the time of the last progress."""
        phase, since_ns = self.cutter.evident_phase()
        return phase, since_ns or self.last_progress_ns

    def take(
        self,
        started: Rows,
        finished: Rows,
        lost: int,
        now_ns: int,
        groups: Callable[[], Sequence[GroupInfo]],
        measured: Rows | None = None,
    ) -> Taken:
        """Take a batch of the ring. ``groups()`` is called if a record names a group that is not known yet.

        ``measured``: what the NCCL shim has measured on the GPU, and has ended.

        The first batch may hold the past of a rank that an earlier agent has watched, so only findings that still hold
        at its end are returned.
        """
        taken = Taken()
        begun: Sequence[Told] = ()
        ended: Sequence[Told] = ()
        if len(started) or len(finished):
            newest_group, _, _, begun = outline(started)
            _, latest_ns, failed, ended = outline(finished)
            if failed or self.failed is not None:
                self._note_failures(finished)
            # Nothing is progress while the rank winds up after an operation that failed, and no phase that did.
            if self.failed is None:
                self.progress += len(started) + len(finished) - failed
                begun_ns = int(started["start_ns"][-1]) if len(started) else 0
                self.last_progress_ns = max(self.last_progress_ns, begun_ns, latest_ns)
            if len(started):
                self.thread = int(started["thread"][-1])
                self._learn_groups(newest_group, groups)
            if len(finished):
                self.clock.take(finished)
                self._learn_phases(ended)
        self.lost += lost
        if measured is not None and len(measured):
            self._learn_groups(outline(measured)[0], groups)
            self.device.take(measured)
            self._measured_ns = now_ns
        cuts = self.cutter.feed(started, finished, lost, now_ns, (begun, ended))
        if self.device.active != self._on_device:
            self._on_device = self.device.active
            self._forget_iterations()  # the host's times and the GPU's are not to be compared
        for cut in cuts:
            self._cut(cut)
        for cut, summary, on_device in self.device.drain(now_ns, self._numbered):
            self._iteration(cut, summary, on_device, now_ns, taken)
        if self.cutter.renumbered != self._renumbered:
            self._renumbered = self.cutter.renumbered
            self._forget_iterations()
            self._cuts.clear()
            self._cut_rows = self._cut_steps = 0
        self._note(taken.findings)
        if not self._caught_up:
            self._caught_up = True
            taken.findings = list(self.standing.values())
        return taken

    def know_groups(self, groups: Sequence[GroupInfo]) -> None:
        """Take the process groups of its ring."""
        if len(groups) > len(self.groups):
            self.groups = list(groups)
            self._names = {number: group.name for number, group in enumerate(self.groups)}
            self.clock.know(self.groups)
            self._has_device = has_device_groups(self.groups)
            self._numbered = dict(enumerate(self.groups))
            self._waiting_groups = frozenset(
                number for number, group in self._numbered.items() if group.records_waits
            )

    @property
    def has_device(self) -> bool:
        """Whether it has groups of a device, on which it may wait unseen."""
        return self._has_device

    @property
    def asks_device(self) -> bool:
        """Whether it stands still for longer than usual and it matters whether its device has calls to finish."""
        hang, told = self.watch.hang, self._told_of_device()
        works = told is not None and told.waits and told.still_s < math.inf
        return self._has_device and (hang.unsure or hang.overdue_s > 0 or works)

    def know_device(
        self, progress: int, calls: DeviceCalls | None, now_ns: int, still_s: float = math.inf
    ) -> None:
        """Take what its device had to finish when the rank had made this progress; None: that is not known.

        ``still_s``: for how long it had ended no call at ``now_ns``.
        """
        if calls is not None and (calls.in_flight or calls.is_whole):
            self._device_told = _DeviceTold(progress, bool(calls.in_flight), still_s, now_ns)
            self._next_search_ns = 0

    def _told_of_device(self) -> _DeviceTold | None:
        """What was told of its device since the rank's last progress."""
        told = self._device_told
        return told if told is not None and told.progress == self.progress else None

    def iterations(self, first_step: int, last_step: int, onset_step: int = -1) -> list[IterationSummary]:
        """The iterations from ``first_step`` to ``last_step``, of the last 256, of which no record was lost.

        Where only some are measured, there are earlier ones in the place of those missing before ``onset_step``.
        """
        found = [one for one in self._history if first_step <= one.step <= last_step]
        lacking = onset_step - first_step - sum(one.step < onset_step for one in found)
        if self._on_device and lacking > 0:
            found = [one for one in self._history if one.step < first_step][-lacking:] + found
        return found + [
            summarise(cut, self.rank, self._names, on_device=self._has_device)
            for several in self._cuts
            if not self._on_device
            and several.steps > 1
            and several.step >= first_step
            and several.first_step <= last_step
            for cut in several.singles()
            if first_step <= cut.step <= last_step
        ]

    def blocks(self, first_step: int, last_step: int) -> list[BlockSummary]:
        """Blocks and messages of the iterations from ``first_step`` to ``last_step``, if among the last two dozen."""
        return [
            block
            for several in self._cuts
            if not self._on_device and several.step >= first_step and several.first_step <= last_step
            for cut in several.singles()
            if first_step <= cut.step <= last_step
            for block in blocks_of(cut, self.rank)
        ]

    def look(
        self,
        now_ns: int,
        in_flight: Callable[[], Rows] | None,
        *,
        stopped_ns: int = 0,
        held: bool = False,
        still_ns: int = 0,
    ) -> Finding | None:
        """Check whether the rank makes progress. To be called about 20 times a second while its process lives.

        ``in_flight()`` is called now and then for the ring's records in flight while the rank makes no progress; None:
        its process has not opened the ring yet.
        ``stopped_ns``: for how long its process has been seen stopped. ``held``: a hold is in force, so that
        a standstill of this rank is intended. ``still_ns``: for how long its process has done nothing at all.
        """
        if not self.progress and in_flight is not None:
            return None
        moved = self.progress != self._progress_then
        if moved or now_ns >= self._next_search_ns:
            # A rank that winds up after its operation failed has waited for others until then.
            gave_up = self.failed is not None and self.waiting
            known = self._told_of_device()
            self.waiting = (
                not moved
                and in_flight is not None
                and (gave_up or (known is not None and known.waits) or blocked(in_flight()))
            )
            self._unseen = self._has_device and known is None and in_flight is not None and not self.waiting
            self._progress_then, self._next_search_ns = self.progress, now_ns + _SEARCH_NS
        phase, _ = self.cutter.phase()
        told = self._told_of_device()
        device_still_s = told.still_at(now_ns) if told is not None else math.inf
        if self._measured_ns > self.last_progress_ns:
            device_still_s = min(device_still_s, (now_ns - self._measured_ns) * 1e-9)
        found = self.watch.progress(
            now_ns * 1e-9,
            self.progress,
            phase,
            self.cutter.step,
            self.waiting,
            stopped_ns * 1e-9,
            held,
            self.last_progress_ns * 1e-9 if self.progress else None,
            still_ns * 1e-9,
            unseen=self._unseen,
            device_still_s=device_still_s,
        )
        if found is not None:
            self._note([found])
        return found

    def forget_standstill(self) -> None:
        """Begin anew with how long the rank stands still."""
        self.standing.pop("hang", None)
        self.watch.hang.stuck = None

    def usual_operations(self) -> set[tuple[int, ...]]:
        """The operations of the latest iterations, by the fields in `USUAL`."""
        latest = list(self._cuts)[-_CUTS_COMPARED:]
        return {same for cut in latest for same in cut.rows[USUAL].tolist()}

    def _learn_groups(self, newest: int, groups: Callable[[], Sequence[GroupInfo]]) -> None:
        if newest >= len(self.groups):
            self.know_groups(groups())

    def _note_failures(self, finished: Rows) -> None:
        operations = chosen(finished, finished["kind"] != _PHASE)
        has_failed = (operations["flags"] & _FAILED) != 0
        failed = chosen(operations, has_failed)
        if self.failed is not None:
            failed = joined([self.failed, failed])
        entered_ns = int(operations["start_ns"][~has_failed].max(initial=0))
        failed = chosen(failed, failed["end_ns"] > entered_ns)[:_MOST_FAILED]
        self.failed = failed if len(failed) else None

    def _learn_phases(self, ended: Iterable[Told]) -> None:
        """Learn from finished phases how long data loading and optimizer steps usually take."""
        longest: dict[int, int] = {}
        for code, _, _, start_ns, end_ns, *_ in ended:
            if code in _SHORT_PHASES:
                longest[code] = max(longest.get(code, 0), end_ns - start_ns)
        for code, took_ns in longest.items():
            self.watch.hang.lasted(PHASES[code], min(took_ns * 1e-9, _LONGEST_SHORT_S))

    def rest(self) -> list[tuple[IterationSummary, int]]:
        """The iterations that still wait for their times on the GPU, each with how many were taken together."""
        drained = self.device.drain(None, self._numbered)
        return [(summary, cut.steps) for cut, summary, _ in drained]

    def _forget_iterations(self) -> None:
        self._history.clear()
        self.watch.forget_iterations()
        self.standing.pop("slow", None)

    def _cut(self, cut: Cut) -> None:
        """Take an iteration as the host has it."""
        self.together = cut.steps
        self.steps += self.together
        if cut.whole:
            self._keep(cut)
        # Of the other groups the GPU's streams are told, for iterations that are measured; the rest count for nothing.
        told = self._waiting_groups if self._on_device else None
        on_device = self._has_device and not self._on_device
        self.device.add(cut, summarise(cut, self.rank, self._names, told=told, on_device=on_device))

    def _iteration(
        self, cut: Cut, summary: IterationSummary, on_device: bool, now_ns: int, taken: Taken
    ) -> None:
        """Take an iteration of which all is known. While the GPU is measured, only its times are a measure."""
        together = cut.steps
        taken.iterations.append((summary, together))
        if on_device != self._on_device:
            return
        self.latest = summary
        if cut.whole and (together == 1 or on_device):
            self._history.append(summary)
        if not cut.warm_up:
            found = self.watch.iteration(
                cut.step - together + 1, summary.duration_s, summary.self_s, now_ns * 1e-9, together
            )
            if found is not None:
                taken.findings.append(self._sharpened(found))

    def _keep(self, cut: Cut) -> None:
        self._cuts.append(cut)
        self._cut_rows, self._cut_steps = self._cut_rows + len(cut.rows), self._cut_steps + cut.steps
        while len(self._cuts) > 1:
            oldest = self._cuts[0]
            steps = oldest.steps
            most = HISTORY if steps > 1 else _CUTS
            if self._cut_rows <= _CUT_ROWS and self._cut_steps - steps < most:
                break
            self._cuts.popleft()
            self._cut_rows -= len(oldest.rows)
            self._cut_steps -= steps

    def _sharpened(self, found: Finding) -> Finding:
        """The finding with its onset at the very iteration, where iterations were cut together around it."""
        reach = found.together
        near = self.iterations(found.onset_step - reach, found.onset_step + 2 * reach - 1)
        if reach == 1 or not near:
            return found
        grown = np.array([one.duration_s for one in near]) - (found.before_s + found.after_s) / 2
        since = np.cumsum((grown if found.kind == "slow" else -grown)[::-1])[::-1]
        return replace(found, onset_step=near[int(since.argmax())].step)

    def _note(self, findings: list[Finding]) -> None:
        for finding in findings:
            if finding.kind in _ENDS:
                self.standing.pop(_ENDS[finding.kind], None)
            else:
                self.standing[finding.kind] = finding
