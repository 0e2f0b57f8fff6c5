"""How often a job may be restarted: by rank, by node, within an hour; and not twice for one error at one step.

The launcher of a job on one node and the controller of one on several nodes keep a `Cause` for each restart, and ask
before the next. ``--max-restarts`` counts the whole life of the job; these budgets look an hour back, so that a job of
weeks may be restarted often, but nothing that is broken is restarted over and over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from keepstep.core.errors import MisfitError, UsageError
from keepstep.core.lost_connection import tells_of_another

WINDOW_S = 3600.0
FLAG = "--restart-budget"
LEFT_EARLY = "left with exit code 0 while others were still training"
"""The error of a rank that has ended well too early, where the errors of all others only tell of it."""
# Addresses, processes and times differ in equal errors.
_VARIES = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
# Errors of a program that no node, network or storage makes.
_OF_THE_PROGRAM = re.compile(
    r"^(?:Type|Attribute|Name|UnboundLocal|Key|Index|Value|Assertion|ZeroDivision|NotImplemented|Recursion)Error\b"
    r"|\bshapes? |size mismatch|sizes? of tensor|to have the same (?:dtype|device)|on the same device|state_dict"
)
# Signals that others send, the kernel too: no errors of the rank's own.
_SENT = re.compile(r"signal \d+ \(SIG(?:KILL|TERM|INT|HUP|QUIT|USR1|USR2)\)")
# A source of states did not answer, and may later.
_UNANSWERED = "CheckpointError: nothing is restored: it is not known what other sources have"
_MOST_QUOTED = 120  # characters of an error
# Kinds of the tables in `detect/tables`. Errors that every restart meets again:
_VAIN = {
    "import": "an import that is not there",
    "syntax": "an error in the program's text",
    "library-missing": "a library that is not there",
}
OUT_OF_GPU_MEMORY = "gpu-oom"
STORAGE = frozenset({"no-space", "quota", "stale-handle", "read-only", "not-mounted", "io-error"})
"""Kinds of errors of storage, which others may mend while the job waits."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5.0, 300.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Most restarts within an hour; 0: as many as ``--max-restarts`` allows.

    ``rank`` counts the restarts that one rank has caused on one node, ``node`` those that one node or its ranks have
    caused, ``hour`` all restarts. ``same`` counts failures of a rank at one step with one error, however long ago: no
    restart follows the last of them.
    """

    rank: int = 5
    node: int = 10
    hour: int = 30
    same: int = 2


@dataclass(frozen=True, slots=True)
class Cause:
    """The failure that a restart was, or would be, made for."""

    at_s: float  # Unix seconds
    node: str
    rank: int = -1  # -1: a node was lost
    step: int = -1  # steps that the rank had finished; -1: not known
    error: str = ""
    by_keepstep: bool = False  # whether keepstep ended the process itself: no budget counts that
    kind: str = ""  # kind of the error where a decision hangs on it (`detect.error_kind`), else empty

    @property
    def is_echo(self) -> bool:
        """Whether the error only shows that another process has died."""
        return tells_of_another(self.error)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no restart. ``node``: a job without that node could go on; "": none could."""

    reason: str
    node: str = ""


def limits_of(text: str) -> Limits:
    """The limits of ``rank=3,hour=12``; limits that are not named have their defaults.

    Raises:
        UsageError: the text names something else, or a value is no count.
    """
    names = [field.name for field in fields(Limits)]
    given: dict[str, int] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, _, count = (part.strip() for part in word.partition("="))
        if name not in names or not (count.isascii() and count.isdigit()):
            raise UsageError(
                f"{FLAG} {text}: {word} is no budget; give {', '.join(f'{one}=N' for one in names)} (0: no limit)"
            )
        given[name] = int(count)
    return Limits(**given)


def as_text(limits: Limits) -> str:
    """The limits as text that `limits_of` reads."""
    return ",".join(f"{field.name}={getattr(limits, field.name)}" for field in fields(limits))


def comes_first(one: Cause, other: Cause) -> Cause:
    """The one of two failures behind a restart that is to blame: the first that is no echo.

    Where keepstep ended a process, the others failed because of that, whatever their errors say. A rank that left early
    explains echoes, but no error that another rank has of its own.
    """
    return min(one, other, key=lambda cause: (not cause.by_keepstep, _distance(cause), cause.at_s))


def _distance(cause: Cause) -> int:
    """How far from a cause it may be: 0 for an error of the rank's own."""
    if cause.is_echo:
        return 2
    return 1 if cause.error == LEFT_EARLY else 0


def refusal(limits: Limits, causes: Sequence[Cause]) -> Refusal | None:
    """Why the job may not begin again after the last of ``causes`` (one for each restart so far, then the newest).

    Processes that keepstep ended itself are left out: ``--max-restarts`` alone counts them.
    """
    last = causes[-1]
    if last.by_keepstep:
        return None
    causes = [cause for cause in causes if not cause.by_keepstep]
    # What has run once can be imported: if it cannot later, something is wrong with a node, or with storage.
    if limits.same and len(causes) == 1 and (vain := _VAIN.get(last.kind)):
        return Refusal(
            f"rank {last.rank} on node {last.node} has failed with {vain} ({_quoted(last)}): "
            f"every restart would meet it again; mend that, or allow restarts with {FLAG} same=0"
        )
    if limits.same and last.error.startswith(f"{MisfitError.__name__}: "):
        return Refusal(
            f"rank {last.rank} on node {last.node} cannot go on from what was saved, which does not fit it, nor would "
            f"it after a restart: mend that, or allow restarts with {FLAG} same=0"
        )
    if limits.same and sum(_same(cause, last) for cause in causes) >= limits.same:
        error = _quoted(last)
        when = f"at step {last.step}" if last.step > 0 else "before its first step"
        times = {1: "once", 2: "twice"}.get(limits.same, f"{limits.same} times")
        what = f"has failed {times} {when} with the same error ({error})"
        if last.error == LEFT_EARLY:
            what = f"has left with exit code 0 {when} {times} while others were still training"
        others = (
            ", as another before it," if any(_same(c, last) and c.rank != last.rank for c in causes) else ""
        )
        return Refusal(
            f"rank {last.rank} on node {last.node}{others} {what}: "
            f"a restart would not help; mend that, or allow it with {FLAG} same=0"
        )
    recent = [cause for cause in causes if cause.at_s > last.at_s - WINDOW_S]
    if limits.same and last.kind == OUT_OF_GPU_MEMORY and sum(one.kind == last.kind for one in recent) > 1:
        return Refusal(
            f"GPU memory was used up twice within an hour, at last on rank {last.rank} on node {last.node} "
            f"({_quoted(last)}): a restart would not help; use less, or allow it with {FLAG} same=0"
        )
    of_node = [cause for cause in recent if cause.node == last.node]
    of_rank = [cause for cause in of_node if cause.rank == last.rank >= 0]
    for name, limit, who, node, count in (
        ("rank", limits.rank, f"rank {last.rank} on node {last.node}", last.node, len(of_rank)),
        ("node", limits.node, f"node {last.node}", last.node, len(of_node)),
        ("hour", limits.hour, "the job", "", len(recent)),
    ):
        if limit and count > limit:
            allowed = f"{limit} restarts are allowed ({FLAG} {name}={limit})"
            return Refusal(f"{who} has failed {count} times within an hour, {allowed}", node)
    return None


def pause_s(causes: Sequence[Cause]) -> float:
    """How long to wait before the restart for the last of ``causes``: longer each time that storage failed lately."""
    last = causes[-1]
    if last.kind not in STORAGE:
        return 0.0
    times = sum(one.kind in STORAGE and one.at_s > last.at_s - WINDOW_S for one in causes)
    return min(_FIRST_PAUSE_S * 2.0 ** (times - 1), _LONGEST_PAUSE_S)


def _quoted(cause: Cause) -> str:
    return cause.error if len(cause.error) <= _MOST_QUOTED else f"{cause.error[:_MOST_QUOTED]}…"


def _same(one: Cause, last: Cause) -> bool:
    """Whether both are failures at one step, with one error: of one rank, or of any.

    An error of all ranks is told of whichever was first. Before the first step another rank may have met what another
    node lacks: there only errors that are a program's own count for all. An echo is nobody's own error, nor is a signal
    from outside, and a death without an error may have any cause.
    """
    return (
        min(one.rank, last.rank) >= 0
        and (one.rank == last.rank or last.step > 0 or bool(_OF_THE_PROGRAM.search(last.error)))
        and one.step == last.step >= 0
        and bool(last.error)
        and not last.is_echo
        and not _SENT.match(last.error)
        and not last.error.startswith(_UNANSWERED)
        and _VARIES.sub("#", one.error) == _VARIES.sub("#", last.error)
    )
