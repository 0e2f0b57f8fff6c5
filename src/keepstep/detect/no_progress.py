"""No progress: a rank that has stood still for longer than this job has ever paused in that phase."""

from __future__ import annotations

import math
from dataclasses import dataclass

from keepstep.core.events import Phase

# Least limits of phases that end by themselves, however long they took before.
_LEAST_S = {Phase.COMPILE: 600.0, Phase.TEARDOWN: 600.0, Phase.GC: 30.0}
_MARKED_PAUSES = frozenset({Phase.EVALUATION, Phase.CHECKPOINT, Phase.GC, Phase.COMPILE})
_STARTUP_LIMIT_S, _PAUSE_LIMIT_S, _FLOOR_S = 600.0, 30.0, 1.0
_STILL_LIMIT_S = 30.0  # for a process that does nothing at all in the start-up
_GAPS_NEEDED = 3  # pauses of a phase that show what is usual for it
_STEPS_NEEDED = 2  # finished steps after which the job is no longer starting up
_GENERATION = 512  # gaps after which the longest of them becomes the previous longest
_LOOK_S = 0.25  # time between two looks; a look that comes later was held up, and so perhaps was the rank


@dataclass(frozen=True, slots=True)
class NoProgress:
    """Nothing has happened since ``since_s`` (the caller's clock), for ``stuck_s``, over ``limit_s``, in ``phase``."""

    since_s: float
    stuck_s: float
    limit_s: float
    phase: Phase


class HangDetector:
    """Tells, for one rank, when a pause is longer than twice the longest that is usual for its phase.

    Gaps between changes of the progress count are remembered per phase (the longest of the last 512 to
    1,024). The limit is twice that, but at least a second. Pauses that were never seen get more:

    - until two steps are done, everything (imports, compilation, a first step of a minute): ten minutes,
      but 30 seconds for a process that does nothing at all and is not ``waiting``;
    - a phase with fewer than three gaps, and evaluations and checkpoints until there were three of them:
      30 seconds, since such pauses end by themselves;
    - compilation, however often it was seen, and the end of a script that winds up: ten minutes;
    - garbage collections, however often they were seen: 30 seconds;
    - outside every marked phase (``Phase.FORWARD``, where an evaluation or a checkpoint that nobody marked
      hides) and while ``waiting`` for other ranks (who may be writing a checkpoint): 30 seconds, until
      three pauses of a quarter of that or more were seen, after which twice the longest is trusted.

    Backward, a marked forward, data loading and the optimizer step hold no such pauses: there the strict limit
    holds as soon as three gaps are known, and before that 30 seconds. A process that was stopped (SIGSTOP,
    a debugger) does nothing of all that: its limit is a second in every phase, and the time that it lost is no
    pause to learn from. A pause that was reported and ended by itself counts as usual from the second time on.

    ``stuck`` is the report that still stands, None again as soon as the rank moves (relief). ``overdue_s`` is how
    long a rank that waits for others has stood still, once that is over what is usual for its phase, else 0. This
    is not reported, as the other ranks may be in a pause. When all ranks of a job are overdue, nobody is. ``pauses``
    holds, by phase and for good, the longest standstill in seconds that the rank has ended by itself. ``unsure``: the
    rank stands still for longer than usual, and what is to be said of it hangs on whether it waits for others, which is
    not known (``unseen``). Until it is, the rank has the patience of one that waits, and is not overdue.
    """

    def __init__(self) -> None:
        self.pauses: dict[Phase, float] = {}
        self._waited = False  # whether it waited for others at the last look
        self._gaps: dict[Phase, _Gaps] = {}
        self._over_limit_once: dict[Phase, float] = {}
        self._progress: int | None = None
        self._since_s = self._seen_s = 0.0  # the last progress, and the look that saw it
        self._phase = Phase.STARTUP
        self._step: int | None = None
        self._steps = 0
        self.stuck: NoProgress | None = None
        self.overdue_s = 0.0
        self.unsure = False
        self._was_held = False  # whether the job was kept waiting since the last progress
        self._stopped = False  # whether the report that stands is about a stopped process

    def limit_s(self, phase: Phase, *, waiting: bool = False) -> float:
        """How long the rank may stand still in ``phase`` before it is reported, seconds."""
        usual = self._usual_s(phase)
        if (phase == Phase.FORWARD or waiting) and self._gaps.get(phase, _NO_GAPS).pauses < _GAPS_NEEDED:
            return max(usual, _PAUSE_LIMIT_S)
        return usual

    @property
    def longest_pause_s(self) -> float:
        """The longest standstill in the present phase that the rank has ended by itself; 0: none was seen."""
        return self.pauses.get(self._phase, 0.0)

    def _usual_s(self, phase: Phase) -> float:
        """The limit in a phase in which no unmarked pause can hide."""
        if self._steps < _STEPS_NEEDED:
            return _STARTUP_LIMIT_S
        gaps = self._gaps.get(phase, _NO_GAPS)
        least = _LEAST_S.get(phase, _FLOOR_S)
        if gaps.count < _GAPS_NEEDED:
            least = max(least, _PAUSE_LIMIT_S)
        return max(least, 2 * gaps.longest_s)

    def lasted(self, phase: Phase, seconds: float) -> None:
        """Learn how long a phase without communication (data loading, optimizer) took.

        Looking at the rank now and then may miss such a gap.
        """
        if self._steps >= _STEPS_NEEDED:
            self._gaps.setdefault(phase, _Gaps()).add(seconds, _PAUSE_LIMIT_S / 4)

    def observe(
        self,
        now_s: float,
        progress: int,
        phase: Phase,
        *,
        step: int,
        waiting: bool = False,
        unseen: bool = False,
        stopped_s: float = 0.0,
        held: bool = False,
        moved_s: float | None = None,
        still_s: float = 0.0,
        device_still_s: float = math.inf,
    ) -> NoProgress | None:
        """Look at the rank at ``now_s``; report once per standstill that it is over the limit.

        ``progress``: a count that grows with whatever the rank does (records written, operations ended).
        ``phase``: the phase that it is in. ``step``: its step count, negative before the first. ``waiting``: it
        is blocked in an operation that others have not entered, so its standstill accuses them, not it. ``unseen``: it
        may be, which is not known.
        ``stopped_s``: for how long its process has been seen stopped. ``held``: whoever observes keeps the job
        waiting; such time is neither a standstill nor a gap to learn from. ``moved_s``: when it made its last
        progress, where that is known better than by looking now and then; ``overdue_s`` is counted from it, a
        report from the look that saw it. ``still_s``: for how long its process has done nothing at all.
        ``device_still_s``: for how long its device had ended nothing when that was last known; a host that is far ahead
        of its device, and waits for it, stands still only as long as that does.
        """
        if step >= 0:
            self._steps += max(0, step - self._step) if self._step is not None else 0
            self._step = step
        if held and self.stuck is None:
            self._progress, self._phase, self._was_held = progress, phase, True
            self._since_s = self._seen_s = now_s
            self.overdue_s, self.unsure = 0.0, False
            return None
        if progress != self._progress:
            since_s = now_s
            if self._progress is not None and not self._was_held:
                self._moved(max(0.0, now_s - self._seen_s))
                since_s = min(now_s, max(now_s - _LOOK_S, moved_s if moved_s is not None else now_s))
            self._progress, self._since_s, self._phase, self.stuck = progress, since_s, phase, None
            self._seen_s = now_s
            self._was_held = self._waited = False
            self.overdue_s, self.unsure = 0.0, False
            return None
        self._phase, self._waited = phase, waiting or unseen
        stuck_s = now_s - self._seen_s
        stopped = min(stopped_s, stuck_s) > _FLOOR_S
        if not stopped:
            stuck_s = min(stuck_s, device_still_s)
        waited_s = min(now_s - self._since_s, device_still_s)
        is_long = waited_s > self._usual_s(phase)
        self.overdue_s = waited_s if waiting and is_long else 0.0
        limit_s = _FLOOR_S if stopped else self.limit_s(phase, waiting=waiting or unseen)
        never_began = (
            self._steps < _STEPS_NEEDED
            and not waiting
            and still_s > _STILL_LIMIT_S
            and phase != Phase.TEARDOWN
        )
        self.unsure = unseen and (is_long or never_began)
        if never_began and not unseen:
            limit_s = min(limit_s, _STILL_LIMIT_S)
        if self.stuck is not None or stuck_s <= limit_s:
            return None
        self._stopped = stopped
        self.stuck = NoProgress(max(self._seen_s, now_s - stuck_s), stuck_s, limit_s, phase)
        return self.stuck

    def _moved(self, gap_s: float) -> None:
        """Learn from a gap that progress has ended."""
        if not self._waited and not (self.stuck is not None and self._stopped):
            self.pauses[self._phase] = max(self.pauses.get(self._phase, 0.0), gap_s)
        if self.stuck is not None:
            if self._stopped:
                return
            before = self._over_limit_once.get(self._phase)
            self._over_limit_once[self._phase] = gap_s
            if before is None:
                return
            gap_s = min(gap_s, before)
        if self._steps >= _STEPS_NEEDED or self._phase in _MARKED_PAUSES:
            visit = self._steps if self._phase in _MARKED_PAUSES else None
            self._gaps.setdefault(self._phase, _Gaps()).add(gap_s, _PAUSE_LIMIT_S / 4, visit)


class _Gaps:
    """The longest gap of one phase over two generations of gaps, so that an early freak is forgotten."""

    __slots__ = ("_current_s", "_in_generation", "_previous_s", "_visit", "count", "pauses")

    def __init__(self) -> None:
        self.count = 0
        self.pauses = 0
        self._current_s = self._previous_s = 0.0
        self._in_generation = 0
        self._visit: int | None = None

    @property
    def longest_s(self) -> float:
        return max(self._current_s, self._previous_s)

    def add(self, gap_s: float, pause_s: float, visit: int | None = None) -> None:
        """Take in a gap; ``pause_s`` and longer, it is a pause.

        ``visit``: number of the stay in the phase. Only the first gap of a stay is counted, as one checkpoint may well
        have many.
        """
        self.count += visit is None or visit != self._visit
        self._visit = visit
        self.pauses += gap_s >= pause_s
        if self._in_generation == _GENERATION:
            self._previous_s, self._current_s, self._in_generation = self._current_s, 0.0, 0
        self._current_s = max(self._current_s, gap_s)
        self._in_generation += 1


_NO_GAPS = _Gaps()
