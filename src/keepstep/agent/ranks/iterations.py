"""Cuts the events of one rank into iterations.

An iteration ends with the end of its last optimizer step; data loading and logging after that belong to the next one.
Evaluation, checkpoints and holds, with the communication in them, are pauses and are left out. Steps are numbered by
the ring's own count of optimizer phases, so that all ranks, and an agent that starts later, number a step alike. If the
script loads a checkpoint (``keepstep.checkpoint.load``), its step is the number of the incarnation's first iteration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np

from keepstep.agent.ranks.custom import CustomLoop
from keepstep.agent.ranks.cut import Cut
from keepstep.agent.ranks.event_buffer import EventBuffer, Rows, chosen
from keepstep.agent.ranks.intervals import NOTHING, Union
from keepstep.agent.ranks.marked_pauses import PAUSES, Marker, checkpoints_in, outside, pauses_in
from keepstep.agent.ranks.markers import StepMarkers
from keepstep.agent.ranks.records import outline, symbols
from keepstep.agent.ranks.usual import UsualSequence
from keepstep.core.events import Kind, Phase

Told = tuple[int, int, int, int, int, int, int, int, int]
"""A record as ``records.of_kind`` tells it."""
WARM_UP_STEPS = 5
QUIET_NS = 50_000_000
LONGEST_TOGETHER_NS = 2_000_000_000
_SHORT_NS = 25_000_000  # longest mean time of iterations that are cut together
_OTHERS = 0.25  # operations more or fewer than usual in an iteration, on average, with which several are still alike
_FIRST_SEQ = 1  # the ring counts from 1
_TIME_BYTES = 8
# Enum members as plain integers: looking them up and comparing them costs more than comparing whole arrays.
_PHASE = int(Kind.PHASE)
_STARTUP, _FORWARD, _BACKWARD, _OPTIMIZER = (
    int(code) for code in (Phase.STARTUP, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
)
_KNOWN = frozenset(map(int, Phase))
_GC, _TEARDOWN = int(Phase.GC), int(Phase.TEARDOWN)
_NOTHING_NEW = {_OPTIMIZER, _GC}
_AFTER = dict.fromkeys((_OPTIMIZER, *PAUSES), int(Phase.AFTER_STEP)) | {_BACKWARD: int(Phase.AFTER_BACKWARD)}
_PASSES = (int(Phase.MODEL), _BACKWARD)
_TRAINS = (*_PASSES, _OPTIMIZER)


class IterationCutter:
    """Takes batches of the ring and returns the iterations that have ended.

    Once it is known how many optimizer steps an iteration has, an iteration is cut when its last optimizer step ends.
    Before that it is cut when another phase begins or 50 ms pass. ``renumbered`` counts how often that number changed:
    earlier iterations then have another length and should be forgotten.

    ``together``, a power of two, is how many iterations are cut together where they are short and alike: at most as
    many as last 2 s, of 25 ms each at most, with their usual operations and without pauses but for checkpoints.
    They end before a step that is a multiple of it, so that all ranks cut alike. 1, as it is at first: each is cut
    singly.
    """

    def __init__(self, records: int = 65536) -> None:
        self.renumbered = 0
        self.together = 1
        self.step = -1  # number of the last finished iteration, be it cut or not
        self.first_step = 0  # number of the first iteration; set before that ends
        self._buffer = EventBuffer()
        self._markers: list[Marker] = []
        self._open: dict[int, tuple[int, int]] = {}  # code and start of open phases, by ticket
        self._teardown: tuple[int, int] | None = None  # ticket and start of an open teardown
        self._passes = dict.fromkeys(_PASSES, 0)  # forward and backward passes begun since the last cut
        self._usual_passes = 0  # forward or backward passes in the last iteration, whichever were more
        self._records = records  # slots of the ring; ends of older records are never reported
        self._last_new_ns = 0  # start of the newest phase that is no optimizer step or garbage collection
        self._last_end_ns = 0  # end of the newest phase
        self._last_ended = _OPTIMIZER  # code of the newest phase that has ended, but for garbage collections
        self._learned = StepMarkers()
        self._usual = UsualSequence()
        self._custom = CustomLoop()
        self._seen_optimizer = False
        self._seen_backward = False
        self._edge_ns: int | None = None
        self._edge_number = -1
        self._edge_ticket = -1
        self._whole = True
        self._last_pause_ns = 0  # start of the newest pause
        self._paused_before_ns = 0  # pauses that began earlier are over and belong to earlier iterations
        self._provisional = 0
        self._singly = 0  # how many of the next iterations are cut singly because they are not alike
        self._custom_ends: list[
            tuple[int, int]
        ] = []  # ends and numbers of those that are not cut, without optimizer

    def feed(
        self,
        started: Rows,
        finished: Rows,
        lost: int,
        now_ns: int,
        phases: tuple[Sequence[Told], Sequence[Told]] | None = None,
    ) -> list[Cut]:
        """Take a batch of the ring at ``now_ns``; return the iterations that it completes, in order.

        ``phases``: those among ``started`` and among ``finished``, where they are known.
        """
        if not self._buffer.add(started, finished) or lost:
            self._whole = False
        custom = not self._seen_optimizer
        begun, ended = phases or (outline(started)[3], outline(finished)[3])
        self._note_phases(begun)
        self._note_ends(ended)
        if not self._seen_optimizer:
            return self._feed_custom(now_ns)
        if custom and self._edge_ns is not None:  # iterations cut without an optimizer were wrong
            self._edge_ns, self._usual = None, UsualSequence()
            self.renumbered += 1
        cuts: list[Cut] = []
        while (last := self._ended(now_ns)) is not None:
            count, cut = self._next()
            if not count:
                break
            if cut is None:
                cut = self._cut(last)
            else:
                self._pass(cut)
            if cut is not None:
                self.step = cut.step
                cuts.append(cut)
        return cuts

    def steps_at_end_of(self, step: int) -> int | None:
        """How many optimizer steps the ring has counted when iteration ``step`` ends; None while that is not known."""
        per_step = self._learned.per_step
        return self._learned.offset + (step - self.first_step + 1) * per_step if per_step else None

    def phase(self) -> tuple[int, int]:
        """The innermost open phase and its start, 0 if unknown; FORWARD if none is open, STARTUP before the first.

        A rank that winds up is in its TEARDOWN, whatever else it is in, such as the interpreter's last collection.
        """
        if self._teardown is not None:
            return _TEARDOWN, self._teardown[1]
        if self._edge_ns is None:
            return _STARTUP, 0
        if self._open:
            return self._open[max(self._open)]
        return _FORWARD, self._last_end_ns

    def evident_phase(self) -> tuple[int, int]:
        """As `phase`, but FORWARD only where a forward pass is evident: after data was loaded, or by a marked one."""
        code, since_ns = self.phase()
        return _AFTER.get(self._last_ended, code) if code == _FORWARD else code, since_ns

    def microbatch(self) -> int:
        """Number of the open forward or backward pass, from 0; -1: none is open, or iterations have only one."""
        code, _ = self.phase()
        if code not in self._passes or self._usual_passes <= 1:
            return -1
        begun = self._passes[code] - 1
        return begun % self._usual_passes if self.together > 1 else begun

    def _note_phases(self, begun: Iterable[Told]) -> None:
        ticket = -1
        for code, _, ticket, start_ns, *_ in begun:
            self._open[ticket] = code if code in _KNOWN else _FORWARD, start_ns
            if code == _TEARDOWN:
                self._teardown = ticket, start_ns
            elif code in _TRAINS:
                self._teardown = None  # a thread may train on when the script's main thread is over
            if code in self._passes:
                self._passes[code] += 1
            elif code in PAUSES:
                self._last_pause_ns = start_ns
            if code not in _NOTHING_NEW:
                self._last_new_ns = max(self._last_new_ns, start_ns)
            self._seen_backward = self._seen_backward or code == _BACKWARD
            self._seen_optimizer = self._seen_optimizer or code == _OPTIMIZER
        oldest = ticket - self._records
        if self._open and min(self._open) < oldest:
            self._open = {ticket: phase for ticket, phase in self._open.items() if ticket >= oldest}

    def _note_ends(self, ended: Iterable[Told]) -> None:
        newest_ns, known = -1, len(self._markers)
        for code, seq, ticket, start_ns, end_ns, thread, *_ in ended:
            self._last_end_ns = max(self._last_end_ns, end_ns)
            if code != _GC and end_ns > newest_ns:
                newest_ns, self._last_ended = end_ns, code
            self._open.pop(ticket, None)
            if self._teardown is not None and ticket == self._teardown[0]:
                self._teardown = None
            if code == _OPTIMIZER:
                self._seen_optimizer = True
                if seq - _FIRST_SEQ > self._edge_number:
                    self._markers.append(Marker(seq - _FIRST_SEQ, ticket, start_ns, end_ns, thread))
        if len(self._markers) > known:
            self._markers.sort(key=attrgetter("number"))

    def _ended(self, now_ns: int) -> int | None:
        """How many of the waiting markers make up a finished iteration; None if no iteration has finished."""
        if not self._markers:
            return None
        per_step = self._learned.per_step
        if not per_step:
            return self._ended_provisionally(now_ns)
        for place, marker in enumerate(self._markers):
            if (marker.number - self._learned.offset) % per_step == per_step - 1:
                return None if self._begun_before(marker.end_ns, _OPTIMIZER) else place + 1
        return None

    def _ended_provisionally(self, now_ns: int) -> int | None:
        """As `_ended`, before the number of steps is known: markers without a backward pass between them are one.

        Without any backward pass in the job, communication between markers separates them instead.
        """
        rows = self._buffer.gather()
        if self._seen_backward:
            between = (rows["kind"] == _PHASE) & (rows["op"] == _BACKWARD)
        else:
            between = rows["kind"] != _PHASE
        tickets = rows["ticket"][between]
        count = 1
        while count < len(self._markers):
            span = np.searchsorted(tickets, [self._markers[count - 1].ticket, self._markers[count].ticket])
            if span[1] > span[0]:
                return count
            count += 1
        end_ns = max(marker.end_ns for marker in self._markers)
        if self._begun_before(end_ns, _OPTIMIZER) or self._begun_before(end_ns, _BACKWARD):
            return None
        over = self._last_new_ns >= end_ns or now_ns - end_ns >= QUIET_NS
        return count if over else None

    def _begun_before(self, time_ns: int, phase: int) -> bool:
        return any(code == phase and start < time_ns for code, start in self._open.values())

    def _cut(self, count: int) -> Cut | None:
        """Cut after the first ``count`` markers; None if only a part of the iteration was seen."""
        taken, self._markers = self._markers[:count], self._markers[count:]
        end_ns = max(marker.end_ns for marker in taken)
        last = taken[-1]
        begun = self._buffer.begun_before(end_ns)
        start_ns = self._edge_ns if self._edge_ns is not None else _first_activity(begun, end_ns)
        found = self._without_pauses(begun, start_ns, end_ns, taken)
        step, follows = self._number(taken)
        complete = follows and (self._edge_ns is not None or taken[0].number == 0)
        whole = self._whole
        self._edge_ns, self._edge_number, self._edge_ticket = end_ns, last.number, last.ticket
        self._whole = True
        self._buffer.drop_before(end_ns)
        self._count_passes(end_ns)
        before = self._numbering()
        if self._learned.learn() and self._numbering() != before:
            self.renumbered += 1
        if not complete:
            return None
        return Cut(step + self.first_step, start_ns, end_ns, *found, step < WARM_UP_STEPS, whole)

    def _count_passes(self, end_ns: int, iterations: int = 1) -> None:
        """Count passes for the next iteration: those that began after the last ``iterations``, which ended then."""
        codes = self._buffer.phases_since(end_ns)
        fresh = {code: codes.count(code) for code in self._passes}
        self._usual_passes = max(self._passes[code] - fresh[code] for code in fresh) // iterations
        self._passes = fresh

    def _number(self, taken: list[Marker]) -> tuple[int, bool]:
        """The iteration's number, and whether no marker is missing since the last cut."""
        last = taken[-1].number
        if self._learned.per_step:
            step = (last - self._learned.offset) // self._learned.per_step
        else:
            self._provisional = self._provisional or len(taken)
            step = last // self._provisional
        return step, last - self._edge_number == len(taken)

    def _numbering(self) -> tuple[int, int]:
        return self._learned.per_step or self._provisional, self._learned.offset

    def _waiting(self) -> tuple[int, int, int]:
        """The number of the first iteration that is not cut, how many have ended, and when the last of these did.

        None have, where markers may be missing.
        """
        if not self._seen_optimizer:
            (_, first), (end_ns, last) = self._custom_ends[0], self._custom_ends[-1]
            count = len(self._custom_ends)
            return first, count if last - first == count - 1 else 0, end_ns
        per_step, first = self._learned.per_step, self._edge_number + 1
        count = len(self._markers) // per_step if per_step else 0
        if count and self._begun_before(self._markers[count * per_step - 1].end_ns, _OPTIMIZER):
            count -= 1
        if not count or (first - self._learned.offset) % per_step:
            return 0, 0, 0
        last = self._markers[count * per_step - 1]
        whole = last.number == first + count * per_step - 1
        return (first - self._learned.offset) // per_step, count if whole else 0, last.end_ns

    def _ends(self, count: int) -> list[int]:
        """The ends of the next iterations that are to be cut."""
        if not self._seen_optimizer:
            return [end_ns for end_ns, _ in self._custom_ends[:count]]
        per_step = self._learned.per_step
        ends_ns = [marker.end_ns for marker in self._markers[: count * per_step]]
        return (
            ends_ns
            if per_step == 1
            else [max(ends_ns[at : at + per_step]) for at in range(0, len(ends_ns), per_step)]
        )

    def _next(self) -> tuple[int, Cut | None]:
        """How many iterations to cut next, and their cut if they are to be cut together; 0: none yet."""
        if self._singly or self.together == 1:
            self._singly = max(self._singly - 1, 0)
            return 1, None
        first, ended, last_ns = self._waiting()
        if not ended or self._edge_ns is None or first < WARM_UP_STEPS:
            return 1, None
        together, each_ns = self.together, (last_ns - self._edge_ns) / ended
        if each_ns > _SHORT_NS:
            return 1, None
        while together > 1 and together * each_ns > LONGEST_TOGETHER_NS:
            together //= 2
        count = together - (first + self.first_step) % together
        if count > ended:
            self.step = first + ended - 1 + self.first_step
            return 0, None
        cut = self._together(first + count - 1, self._ends(count), self._edge_ns) if count > 1 else None
        self._singly = count - 1 if cut is None else 0
        return count if cut else 1, cut

    def _together(self, number: int, ends_ns: list[int], start_ns: int) -> Cut | None:
        """The iterations up to ``number``, which end at ``ends_ns``, as one cut; None unless they are as usual."""
        usual, end_ns, pauses = self._usual.length, ends_ns[-1], NOTHING
        if not usual or not self._whole:
            return None
        begun = self._buffer.begun_before(end_ns)
        if self._last_pause_ns >= self._paused_before_ns:
            saved = checkpoints_in(begun, start_ns, end_ns, self._markers) if self._markers else None
            if saved is None:
                return None
            pauses, begun = saved, outside(begun, saved) if saved.total_ns else begun
        found = len(symbols(begun, since_ns=start_ns)[1]) // _TIME_BYTES
        if abs(found - usual * len(ends_ns)) > _OTHERS * len(ends_ns):
            return None
        ends = np.array(ends_ns, np.int64)
        step = number + self.first_step
        return Cut(step, start_ns, end_ns, begun, pauses, checkpoint_ns=pauses.total_ns, ends_ns=ends)

    def _pass(self, cut: Cut) -> None:
        """Leave behind what was cut together."""
        if self._seen_optimizer:
            count = cut.steps * self._learned.per_step
            last = self._markers[count - 1]
            del self._markers[:count]
            self._edge_number, self._edge_ticket = last.number, last.ticket
            self._count_passes(cut.end_ns, cut.steps)
        self._edge_ns = cut.end_ns
        self._buffer.drop_before(cut.end_ns)

    def _teach(self, rows: Rows, taken: list[Marker]) -> None:
        """Tell the learner of the markers which operations and passes lie between each of them and the one before."""
        before = self._edge_ticket
        for marker in taken:
            content, _, backward = symbols(rows, before + 1, marker.ticket)
            self._learned.add(marker.number, content, backward)
            before = marker.ticket

    def _feed_custom(self, now_ns: int) -> list[Cut]:
        """As `feed`, for a loop without optimizer steps, which is cut by its communication alone."""
        cuts: list[Cut] = []
        self._custom_ends += self._custom.edges(self._buffer, now_ns)
        while self._custom_ends:
            count, cut = self._next()
            if not count:
                break
            if cut is None:
                cut = self._cut_custom(*self._custom_ends[0])
            else:
                self._pass(cut)
            del self._custom_ends[:count]
            if cut is not None:
                self.step = cut.step
                cuts.append(cut)
        return cuts

    def _cut_custom(self, end_ns: int, number: int) -> Cut | None:
        begun, start_ns, whole = self._buffer.begun_before(end_ns), self._edge_ns, self._whole
        self._edge_ns, self._whole = end_ns, True
        cut = None
        if start_ns is not None and len(begun):
            found = self._without_pauses(begun, start_ns, end_ns, None)
            cut = Cut(number + self.first_step, start_ns, end_ns, *found, number < WARM_UP_STEPS, whole)
        self._buffer.drop_before(end_ns)
        return cut

    def _without_pauses(
        self, begun: Rows, start_ns: int, end_ns: int, taken: list[Marker] | None
    ) -> tuple[Rows, Union, int, int]:
        """The records outside all pauses, the iteration's pauses, and the time of evaluation and of checkpoints."""
        pauses, evaluation_ns, checkpoint_ns = NOTHING, 0, 0
        if self._last_pause_ns >= self._paused_before_ns:
            pauses, evaluation_ns, checkpoint_ns = pauses_in(
                begun, start_ns, end_ns, taken[-1] if taken else None
            )
            begun = outside(begun, pauses) if pauses.total_ns else begun
            going_on = [start for code, start in self._open.values() if code in PAUSES and start < end_ns]
            self._paused_before_ns = min([end_ns, *going_on])
        if taken:
            self._teach(begun, taken)
        numbers, starts, _ = symbols(begun, since_ns=start_ns)
        unmarked = self._usual.pause_ns(numbers, starts, start_ns + pauses.total_ns, end_ns)
        if unmarked:
            # It lies at the iteration's start, and lasts longer by the marked pauses inside it.
            until_ns, marked_ns = start_ns + unmarked + pauses.total_ns, pauses.total_ns
            pauses = pauses.joined(Union(np.array([start_ns], np.int64), np.array([until_ns], np.int64)))
            evaluation_ns += pauses.total_ns - marked_ns
            begun = outside(begun, pauses)
        return begun, pauses, evaluation_ns, checkpoint_ns


def _first_activity(rows: Rows, end_ns: int) -> int:
    """When the first iteration begins: after the start-up phase if there is one, else with the first record."""
    startup = chosen(rows, (rows["kind"] == _PHASE) & (rows["op"] == _STARTUP))
    if len(startup) and int(startup["end_ns"].max()) > 0:
        return min(int(startup["end_ns"].max()), end_ns)
    return int(rows["start_ns"].min()) if len(rows) else end_ns
