"""How often a job may begin again: by rank, by node, within an hour; and not twice for one error at one step.

Pure, and the same for one node and for several: who restarts a job keeps one `Cause` for each restart, and asks before
the next. ``--max-restarts`` counts the whole life of the job; these budgets look an hour back, so that a job of weeks
may be restarted often, but nothing that is broken is restarted over and over.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

from keepstep.core.errors import UsageError
from keepstep.core.lost_connection import tells_of_another

WINDOW_S = 3600.0
FLAG = "--restart-budget"
_VARIES = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)  # addresses, processes, times: in equal errors, too
_MOST_QUOTED = 120


@dataclass(frozen=True, slots=True)
class Limits:
    """Restarts within an hour; 0: as many as ``--max-restarts`` allows."""

    rank: int = 5  # that one rank has caused on one node
    node: int = 10  # that one node, or its ranks, have caused
    hour: int = 30  # in all
    same: int = (
        2  # failures of a rank at one step with one error, whenever: no restart follows the last; 0: one does
    )


@dataclass(frozen=True, slots=True)
class Cause:
    """What a restart was, or would be, for. ``at_s``: Unix seconds. ``rank`` -1: a node was lost."""

    at_s: float
    node: str
    rank: int = -1
    step: int = -1  # finished steps of that rank; -1: not known
    error: str = ""
    by_keepstep: bool = False  # keepstep ended the process itself: no budget counts that

    @property
    def is_echo(self) -> bool:
        """Whether it only tells of another's death."""
        return tells_of_another(self.error)


@dataclass(frozen=True, slots=True)
class Refusal:
    """No restart, and why. ``node``: a job without that node could go on; "": none could."""

    reason: str
    node: str = ""


def limits_of(text: str) -> Limits:
    """``rank=3,hour=12`` as limits; what is not named has its default.

    Raises:
        UsageError: something else is named, or is no count.
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
    """What `limits_of` reads."""
    return ",".join(f"{field.name}={getattr(limits, field.name)}" for field in fields(limits))


def comes_first(one: Cause, other: Cause) -> Cause:
    """Of two failures that led to one restart the one to blame: the first that is no echo.

    Where keepstep ended a process, the others failed because of that, whatever they say.
    """
    return min(one, other, key=lambda cause: (not cause.by_keepstep, cause.is_echo, cause.at_s))


def refusal(limits: Limits, causes: Sequence[Cause]) -> Refusal | None:
    """Why the job may not begin again after the last of ``causes`` (one for each restart so far, then the newest).

    What keepstep ended itself is left out: ``--max-restarts`` alone counts it.
    """
    last = causes[-1]
    if last.by_keepstep:
        return None
    causes = [cause for cause in causes if not cause.by_keepstep]
    if limits.same and sum(_same(cause, last) for cause in causes) >= limits.same:
        error = last.error if len(last.error) <= _MOST_QUOTED else f"{last.error[:_MOST_QUOTED]}…"
        when = f"at step {last.step}" if last.step > 0 else "before its first step"
        return Refusal(
            f"rank {last.rank} on node {last.node} has failed {_times(limits.same)} {when} with the same error "
            f"({error}): a restart would not help; mend that, or allow it with {FLAG} same=0"
        )
    recent = [cause for cause in causes if cause.at_s > last.at_s - WINDOW_S]
    counts = (
        (
            "rank",
            f"rank {last.rank}",
            last.node,
            [one for one in recent if (one.rank, one.node) == (last.rank, last.node) and one.rank >= 0],
        ),
        ("node", f"node {last.node}", last.node, [one for one in recent if one.node == last.node]),
        ("hour", "the job", "", recent),
    )
    for name, who, node, caused in counts:
        limit: int = getattr(limits, name)
        if limit and len(caused) > limit:
            where = f" on node {last.node}" if name == "rank" else ""
            return Refusal(
                f"{who}{where} has failed {len(caused)} times within an hour, {limit} restarts are allowed "
                f"({FLAG} {name}={limit})",
                node,
            )
    return None


def _same(one: Cause, last: Cause) -> bool:
    """Of one rank, at one step, with one error; an echo is nobody's error, and what left no word may be anything."""
    return (
        one.rank == last.rank >= 0
        and one.step == last.step >= 0
        and bool(last.error)
        and not last.is_echo
        and _bare(one.error) == _bare(last.error)
    )


def _bare(error: str) -> str:
    return _VARIES.sub("#", error)


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
