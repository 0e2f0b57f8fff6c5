"""The words of a job's ranks and kernels, kept within bounds, and the failure that they tell."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import re
import signal
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from keepstep.core.finding import Finding
from keepstep.core.incident import NETWORK, Diagnosis, FailureCause, SpokenLine
from keepstep.core.summary import RankState
from keepstep.core.told import KERNEL_SOURCES, Failure, Role, Row, Speaker, Told, Words
from keepstep.wire import messages as wire

logger = logging.getLogger("keepstep.control")

# So many lines are kept of all nodes together, and of one node.
_MOST_LINES = 32_768
_MOST_OF_NODE = 64
_MOST_FOLLOWING = 4096  # lines of those that only tell of others
_FOLLOWING: tuple[Role, ...] = ("echo", "timeout", "note")
# A node's clock may differ from the controller's by so much.
_CLOCK_S = 1.0
_KERNEL = -1
# An error of a kernel or driver after which all ranks of its node worked on for so long did not end the job.
_WENT_ON_S = 60.0
_MOST_THEN = 4
_MOST_RANKS = 4096
_MOST_FOLLOWED = 12  # ranks of which a line that only tells of others is shown
_LONGEST = 500
# Functions of the kernel in which a process waits for a file server; `detect.stillness` has more.
_OF_STORAGE = re.compile(
    r"fuse|request_wait_answer|nfs|rpc_|ceph|cifs|smb|ptlrpc|lustre|osc_|cl_sync|gpfs|beegfs|9p"
)
# What the kernel says of processes may be about another job's: it counts where a rank of the node died so.
_OF_PROCESSES = {"host-oom": 128 + signal.SIGKILL, "segv": 128 + signal.SIGSEGV, "stuck-in-kernel": -1}
# A stream has fewer blocks than this, so that blocks of different streams have different numbers.
_MOST_BLOCKS = 1 << 20


class JobWords:
    """What ranks and kernels have said in this incarnation that tells of a failure."""

    def __init__(
        self,
        unix_s: Callable[[float], float],
        moved_on_s: Callable[[str], float | None] = lambda node: None,
    ) -> None:
        """``unix_s``: Unix time of a moment on the controller's clock.

        ``moved_on_s``: until when, on that clock, all ranks of a node made progress; None: that is not known.
        """
        self._unix_s, self._moved_on_s = unix_s, moved_on_s
        self._since_unix_s: float = 0.0
        self._until_unix_s: float = math.inf
        # The incarnations that count, as far as they are known: from this one on, and before the other one.
        self._first: int = 0
        self._next: float = math.inf
        self._over: JobWords | None = (
            None  # words of the incarnation before, until it is known which one begins
        )
        self._told: dict[str, list[Told]] = {}  # by node
        self._streams: dict[tuple[str, int, str], int] = {}  # numbers of streams, by node, rank and name
        self._lines = self._following = 0

    def heard(self, node: str, message: wire.Words) -> bool:
        """Keep lines that a node's agent has sent; whether any is new."""
        from keepstep.detect.prefixes import spoken

        lines, before = self._told.setdefault(node, []), self._lines
        known = {(one.speaker.rank, one.source, one.number, one.row.name, one.line) for one in lines}
        for said in message.lines:
            row, places = _row_of(said.row, said.line)
            rank = None if said.rank == _KERNEL else said.rank
            if row is None or not self._is_of_now(said, message.incarnation):
                continue
            key = (rank, said.source, said.number, row.name, said.line)
            if key in known or not self._has_room(row, len(lines)):
                continue
            known.add(key)
            label = f"rank {rank}" if rank is not None else "kernel"
            stream = self._streams.setdefault((node, said.rank, said.source), len(self._streams))
            lines.append(
                Told(
                    row,
                    *(said.line, spoken(said.line).text, said.number, said.source, said.unix_s),
                    speaker=Speaker(rank, node=node, label=label),
                    block=stream * _MOST_BLOCKS + said.block % _MOST_BLOCKS,
                    begins=said.begins,
                    places=said.places or places,
                    warned=said.warned,
                )
            )
            self._lines += 1
            self._following += row.role in _FOLLOWING
        return self._lines > before

    def _is_of_now(self, said: wire.Said, incarnation: int) -> bool:
        """Whether a line is of what counts here, however late it was read. ``incarnation``: of its rank; -1: unknown.

        The last lines of a process are read after its end, when the next incarnation may have begun.
        """
        is_in_time = self._since_unix_s - _CLOCK_S <= said.unix_s <= self._until_unix_s + _CLOCK_S
        if incarnation < 0:
            return is_in_time
        if incarnation >= self._next:
            # The next agent may be the first to read what the kernel wrote in this incarnation.
            return is_in_time and (said.rank == _KERNEL or said.source in KERNEL_SOURCES)
        is_late = self._next < math.inf and said.unix_s > self._until_unix_s
        return incarnation >= self._first and (is_in_time or is_late)

    def _has_room(self, row: Row, of_node: int) -> bool:
        if row.role in _FOLLOWING and self._following >= _MOST_FOLLOWING:
            return False
        return of_node < _MOST_OF_NODE and self._lines < _MOST_LINES

    def begin_again(self, now_s: float) -> JobWords:
        """Forget everything, as the ranks that said it are gone; returns it for who has yet to explain their end."""
        over = JobWords(self._unix_s, self._moved_on_s)
        over._since_unix_s, over._until_unix_s = self._since_unix_s, self._unix_s(now_s)
        over._told, self._told = self._told, {}
        over._streams, self._streams = self._streams, {}
        over._lines, over._following = self._lines, self._following
        self._since_unix_s, self._lines, self._following = over._until_unix_s, 0, 0
        over._first, self._over = self._first, over
        return over

    def begins(self, incarnation: int) -> None:
        """Tell which incarnation begins: what processes of earlier ones have written does not count for it."""
        self._first = incarnation
        if self._over is not None:
            self._over._next, self._over = incarnation, None

    def failure(self, deaths: Collection[tuple[Finding, float]], ranks: Collection[int]) -> Failure:
        """What all words tell, with the last lines of the ranks that died of which nothing else was heard.

        ``deaths``: with the Unix time at which each was heard of. ``ranks``: all ranks of the job.
        """
        from keepstep.locate.failure import explain

        spoke = {one.speaker.rank for told in self._told.values() for one in told}
        last = [_last_words(*death) for death in deaths if death[0].message and death[0].rank not in spoke]
        died = {(death.node, death.exit_code) for death, _ in deaths}
        logs = [
            Words(tuple(one for one in told if _concerns(one, died) and not self._is_over(node, one)))
            for node, told in self._told.items()
        ]
        return explain([*logs, *last, Words((), heard=frozenset(ranks))])

    def _is_over(self, node: str, one: Told) -> bool:
        """Whether all ranks of a node worked on for long after its kernel or a driver told of an error."""
        moved_on_s = self._moved_on_s(node) if one.source in KERNEL_SOURCES else None
        return (
            moved_on_s is not None
            and one.time_s is not None
            and (self._unix_s(moved_on_s) > one.time_s + _WENT_ON_S)
        )


def _concerns(one: Told, died: Collection[tuple[str, int]]) -> bool:
    """Whether a line is about this job. ``died``: nodes and exit codes of the ranks that died."""
    wanted = _OF_PROCESSES.get(one.row.kind)
    from_kernel = one.speaker.rank is None
    return not from_kernel or wanted is None or (one.speaker.node, wanted) in died


def cause_of(failure: Failure) -> FailureCause | None:
    """The failure as an incident has it; None where no words tell of one."""
    if not failure.cause_class:
        return None
    root = failure.root
    ranks = {one.speaker.rank for one in failure.followers if one.speaker.rank is not None}
    known = {root.row.name if root else ""}
    then: list[Told] = []
    for one in failure.then:
        if one.row.name not in known and one.row.role != "note" and len(then) < _MOST_THEN:
            known.add(one.row.name)
            then.append(one)
    return FailureCause(
        failure.cause_class,
        failure.kind,
        failure.title,
        failure.confidence,
        failure.advice,
        root.row.name if root else "",
        _spoken(root) if root else None,
        tuple(_spoken(one) for one in then),
        sum(one.count for one in failure.followers),
        tuple(sorted(ranks))[:_MOST_RANKS],
        failure.missing,
        root.places.get("path", "") if root else "",
        _version(),
        _first_of_each(failure.followers),
    )


def cause_of_hang(diagnosis: Diagnosis, states: Mapping[int, RankState]) -> FailureCause | None:
    """The class of what keeps ranks waiting, where the verdict shows it without any words."""
    sure = diagnosis.culprits[0].confidence if diagnosis.culprits else "low"
    if diagnosis.kind == "desync":
        advice = "compare the programs' paths: ranks call collectives in another order, or of other sizes"
        return FailureCause("user", "desync", "ranks are in different collectives", sure, advice)
    if any(one.link is not None or one.cause == NETWORK for one in diagnosis.culprits):
        return FailureCause("network", "path", "a path between nodes carries nothing", sure)
    ranks = {one.rank for one in diagnosis.culprits if one.rank is not None}
    waits = [one.stillness for rank, one in states.items() if rank in ranks and one.stillness is not None]
    if any(one.how == "kernel" and _OF_STORAGE.search(one.why) for one in waits):
        title, advice = "a file server does not answer", "see the server and its mounts on that node"
        return FailureCause("storage", "stuck-in-kernel", title, "medium", advice)
    return None


def _first_of_each(followers: Sequence[Told]) -> tuple[SpokenLine, ...]:
    """The first line of each rank that only tells of others, as far as they are shown."""
    found: dict[int, SpokenLine] = {}
    for one in sorted(followers, key=lambda one: one.time_s or 0.0):
        rank = one.speaker.rank
        if rank is not None and rank not in found and len(found) < _MOST_FOLLOWED:
            found[rank] = _spoken(one)
    return tuple(found.values())


def _spoken(one: Told) -> SpokenLine:
    who = one.speaker
    return SpokenLine(one.line[:_LONGEST], who.rank, who.node, one.source, one.number, one.time_s)


def read_tables_ahead() -> None:
    """Read the tables of messages in a thread: 0.2 s of CPU time, which the first failure would cost else."""

    def read() -> None:
        try:
            importlib.import_module("keepstep.locate.failure")
            _rows()
        except Exception:
            logger.exception("the tables of messages cannot be read")

    threading.Thread(target=read, name="keepstep-rows", daemon=True).start()


@functools.cache
def _rows() -> Mapping[str, Row]:
    """The rows of the tables by name, with those for errors that no row knows."""
    from keepstep.detect.listener import GENERAL_ROWS
    from keepstep.detect.own_tables import matcher_in_force, own_rows

    for line in own_rows()[1]:
        logger.warning("%s", line)
    return {row.name: row for row in (*reversed(matcher_in_force().rows), *GENERAL_ROWS)}


def _row_of(name: str, line: str) -> tuple[Row | None, Mapping[str, str]]:
    """The row of this name, or what the line tells by the tables here, and which places: its node may have others."""
    from keepstep.detect.own_tables import matcher_in_force
    from keepstep.detect.prefixes import spoken

    if (row := _rows().get(name)) is not None:
        return row, {}
    found = matcher_in_force().match(spoken(line).text)
    return found if found is not None and found[0].role != "harmless" else (None, {})


@functools.cache
def _version() -> str:
    from keepstep import __version__

    return __version__


def _last_words(death: Finding, heard_unix_s: float) -> Words:
    """What the last line of a rank that died tells."""
    from keepstep.detect.listener import Listener
    from keepstep.detect.own_tables import matcher_in_force

    listener = Listener(matcher_in_force(), f"last line of rank {death.rank}", death.rank)
    listener.take(death.message.encode(errors="replace") + b"\n")
    words = listener.words()
    told = (
        replace(one, time_s=heard_unix_s, speaker=replace(one.speaker, node=death.node)) for one in words.told
    )
    return replace(words, told=tuple(told))
