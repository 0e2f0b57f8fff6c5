"""What NCCL's watchdogs say in a log when operations time out: how far each rank was in each process group."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.core.events import UNTOLD, Op
from keepstep.core.summary import GroupInfo, OpInFlight, RankState, StreamProgress
from keepstep.traces.log_text import speaker

MARKS = (b"atchdog", b"NCCL work", b"enqueued work", b"collective #", b"Error: ")
"""One of these is in every line that may matter."""

_MOST_RANKS = 1 << 20
_NO_PHASE = -1
_FEW = 4  # operations by which the ranks of a group may differ where lines name no group
_DEFAULT = "0"  # the name of the group of all ranks
_TIMEOUT = re.compile(
    r"Rank (\d{1,7})\] Watchdog caught collective operation timeout: "
    r"WorkNCCL\((?:SeqNum=(\d{1,18}), ?)?OpType=(\w{1,40})(?:, ?NumelIn=(\d{1,15})\b)?"
)
_GROUP = re.compile(
    r"\[PG (?:ID )?(?P<id>\d{1,9})(?: PG GUID (?P<guid>[^\s()\]]{1,100}))? ?(?:\((?P<desc>[^()\]]{0,100})\))? "
    r"Rank (?P<rank>\d{1,7})\]"
)
_STATUS = re.compile(
    r"last enqueued (?:NCCL )?work: (-?\d{1,20}), last completed(?: NCCL)?(?: work)?: (-?\d{1,20})",
    re.IGNORECASE,
)
_AT = re.compile(r"(?:at work|at NCCL work): (\d{1,18})")
_DESYNC = re.compile(
    r"\[([\d, ]{1,4000})\] (?:finished collective #(\d{1,18}), but didn't join|joined but didn't finish) "
    r"collective #(\d{1,18})"
)
_ERROR = re.compile(r"\b(?!DistBackendError|ChildFailedError)\w{0,60}Error: .{0,120}")
_OPS: tuple[tuple[str, Op], ...] = (
    ("REDUCE_SCATTER", Op.REDUCE_SCATTER), ("ALLGATHER", Op.ALLGATHER), ("ALLTOALL", Op.ALLTOALL),
    ("ALLREDUCE", Op.ALLREDUCE), ("BARRIER", Op.BARRIER), ("BROADCAST", Op.BROADCAST), ("GATHER", Op.GATHER),
    ("SCATTER", Op.SCATTER), ("REDUCE", Op.REDUCE),
)  # fmt: skip
_MESSAGES = ("SEND", "RECV")
# Operations that every member calls with as many elements.
_ALIKE = (Op.ALLREDUCE, Op.ALLGATHER, Op.REDUCE_SCATTER, Op.BROADCAST, Op.REDUCE)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The groups and states of the ranks whose watchdogs spoke, as evidence for a locator of hangs.

    Attributes:
        groups: with those members only that are known from the log.
        states: how far each rank was; an operation that timed out is in flight.
        waiting: ranks that timed out, in an operation of ``states`` or in a message, whose other end is not told.
        heard: ranks that wrote anything with their number before it, or are counted by the others.
        errors: by rank, the first error that it told of.
    """

    groups: Mapping[str, GroupInfo]
    states: tuple[RankState, ...]
    waiting: frozenset[int]
    heard: frozenset[int]
    errors: Mapping[int, str]


@dataclass(slots=True)
class _Status:
    enqueued: int
    completed: int
    op: str = ""
    elements: int | None = (
        None  # number that the rank brings; None where it is not told, or need not be alike
    )


class WatchdogWords:
    """Takes the lines of one run, one after the other."""

    def __init__(self) -> None:
        self._descriptions: dict[str, str] = {}
        self._known: dict[int, dict[str, _Status]] = {}  # by rank and group
        # Operation and elements, by rank and sequence number.
        self._timeouts: dict[tuple[int, int], tuple[str, int | None]] = {}
        self._unique = {_DEFAULT}  # names that only one group of the job has
        self._spoke: set[int] = set()  # ranks whose watchdog found a timeout
        self._in_message: set[int] = set()
        self._heard: set[int] = set()
        self._errors: dict[int, str] = {}
        self._group = _DEFAULT  # of the line before

    def hear(self, rank: int) -> None:
        """Note that a rank has written something."""
        if rank < _MOST_RANKS:
            self._heard.add(rank)

    def take(self, text: str) -> bool:
        """Take a line; whether it was about an operation that timed out."""
        _, labelled = speaker(text)
        group = _GROUP.search(text)
        if group is not None:
            self._group = group["guid"] or group["id"]
            if group["guid"]:
                self._unique.add(self._group)
            if group["desc"]:
                self._descriptions[self._group] = group["desc"]
        timeout, status = _TIMEOUT.search(text), _STATUS.search(text)
        if timeout is not None:
            elements = int(timeout[4]) if timeout[4] else None
            self._timed_out(
                int(timeout[1]) if labelled is None else labelled, timeout[2], timeout[3], elements
            )
        if status is not None and (group is not None or labelled is not None):
            # A rank within its group, which only in the group of all ranks is the rank in the job.
            rank = int(group["rank"]) if labelled is None and group is not None else labelled or 0
            at = _AT.search(text)
            place = self._group if group is not None else _DEFAULT
            self._count(place, rank, int(status[1]), int(status[2]), int(at[1]) if at else None)
        elif timeout is None:
            self._laggards(text)
            error = _ERROR.search(text)
            if error is not None and labelled is not None:
                self._errors.setdefault(labelled, error[0])
        return timeout is not None or status is not None

    def found(self) -> Timeouts | None:
        """What all lines together say; None if no operation timed out."""
        if not self._spoke:
            return None
        self._place_timeouts()
        members: dict[str, list[int]] = {}
        ops: dict[str, str] = {}
        for rank, own in sorted(self._known.items()):
            for key, one in own.items():
                members.setdefault(key, []).append(rank)
                ops[key] = one.op or ops.get(key, "")
        groups = {
            self._name(key): GroupInfo(self._name(key), tuple(ranks), "", self._descriptions.get(key, ""))
            for key, ranks in members.items()
        }
        states = tuple(self._state(rank, ops) for rank in sorted(self._known))
        waiting = {state.rank for state in states if state.in_flight} | self._spoke
        heard = self._heard | self._spoke | {state.rank for state in states}
        return Timeouts(groups, states, frozenset(waiting), frozenset(heard), dict(self._errors))

    def _timed_out(self, rank: int, seq: str | None, op: str, elements: int | None) -> None:
        if rank >= _MOST_RANKS:
            return
        self._spoke.add(rank)
        if op in _MESSAGES:
            self._in_message.add(rank)
        elif seq is not None:
            self._timeouts[rank, int(seq)] = op, elements

    def _count(self, group: str, rank: int, enqueued: int, completed: int, at: int | None) -> None:
        if rank >= _MOST_RANKS:
            return
        if at is not None:
            self._spoke.add(rank)
        if not 0 <= completed <= enqueued:  # nothing yet, or a number that was never set
            completed = min(at, enqueued) - 1 if at is not None else 0
        self._known.setdefault(rank, {})[group] = _Status(max(enqueued, 0), max(completed, 0))

    def _laggards(self, text: str) -> None:
        """Lines of TORCH_NCCL_DESYNC_DEBUG: which ranks have not joined, or not finished, a collective."""
        found = _DESYNC.search(text)
        if found is None:
            return
        for word in found[1].split(","):
            if word.strip().isdigit() and int(word) < _MOST_RANKS:
                enqueued = int(found[2] or found[3])
                completed = enqueued if found[2] else enqueued - 1
                self._known.setdefault(int(word), {}).setdefault(self._group, _Status(enqueued, completed))

    def _place_timeouts(self) -> None:
        """Give operations that timed out to their groups: to one that waits at that number.

        Where no group is named, it is that of all ranks if they are about as far in the same operation. Else they are
        of several groups, of which nothing is known but that these ranks wait.
        """
        loose: dict[int, tuple[int, str]] = {}
        for (rank, seq), (op, elements) in sorted(self._timeouts.items()):
            if rank not in self._known:
                loose.setdefault(rank, (seq, op))
                continue
            own = self._known[rank]
            fitting = [key for key, one in own.items() if one.completed + 1 == seq <= one.enqueued]
            for key in fitting[:1]:
                own[key].op = op
            # Ranks of two groups may wait at one number, with other sizes.
            if len(fitting) == 1 and fitting[0] in self._unique and _op(op) in _ALIKE and "SPARSE" not in op:
                own[fitting[0]].elements = elements
        if not loose:
            return
        numbers = [seq for seq, _ in loose.values()]
        numbers += [own[_DEFAULT].completed + 1 for own in self._known.values() if _DEFAULT in own]
        if max(numbers) - min(numbers) <= _FEW and len({op for _, op in loose.values()}) == 1:
            for rank, (seq, op) in loose.items():
                self._known[rank] = {_DEFAULT: _Status(seq, seq - 1, op)}

    def _name(self, key: str) -> str:
        description = self._descriptions.get(key, "")
        return f"{key} ({description})" if description else key

    def _state(self, rank: int, ops: Mapping[str, str]) -> RankState:
        """``ops``: what the group's members called the operation."""
        flights: list[OpInFlight] = []
        streams: list[StreamProgress] = []
        for key, one in sorted(self._known[rank].items()):
            op, name = _op(one.op or ops[key]), self._name(key)
            # Operations of a group run one after the other: none after the first unfinished one has begun.
            entered = min(one.enqueued, one.completed + 1)
            streams.append(StreamProgress(name, op, -1, entered, one.completed))
            if entered > one.completed and rank not in self._in_message:
                known = one.elements is not None
                flights.append(
                    OpInFlight(
                        name, op, -1, entered, 0.0, bytes=one.elements or 0, element=UNTOLD if known else ""
                    )
                )
        return RankState(rank, True, -1, _NO_PHASE, 0.0, 0, 0.0, 0.0, tuple(flights), tuple(streams), "?")


def _op(word: str) -> int:
    return int(
        next((op for part, op in _OPS if part in word.strip("_").replace("ALL_", "ALL")), Op.ALLREDUCE)
    )
