"""How the micro-batches of a step are divided among the replicas of a model: what workers report, and are ordered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Split:
    """How one rank's job divides each global batch, from ``step`` on.

    Attributes:
        rank: the rank that reports the split.
        incarnation: the incarnation of the job.
        count: micro-batches in a step, of all replicas together.
        replica: number of the replica that the rank is part of, from 0.
        replicas: number of replicas.
        multiple_of: the number that each share is a multiple of.
        at_most: the largest possible share; 0: there is no bound.
        number: number of the ordered shares that are in force; 0: shares are equal.
        step: the first step that was divided in this way.
        share: micro-batches of the rank's replica.
        movable: whether shares may differ: not where replicas meet in each micro-batch.
    """

    rank: int
    incarnation: int
    count: int
    replica: int
    replicas: int
    multiple_of: int = 1
    at_most: int = 0
    number: int = 0
    step: int = 0
    share: int = 0
    movable: bool = True


MOST_MICROBATCHES = (1 << 31) - 1


def objection(count: int, replicas: int, multiple_of: int, at_most: int) -> str:
    """Why so many micro-batches cannot be divided among so many replicas; "" when they can."""
    if not 0 < count <= MOST_MICROBATCHES or replicas < 1 or multiple_of < 1:
        return (
            f"{count} micro-batches for {replicas} replicas, of which each takes a multiple of {multiple_of}"
        )
    if count % multiple_of:
        return f"{count} micro-batches are not a multiple of {multiple_of}, which each replica's share is"
    if count < replicas * multiple_of:
        return f"{count} micro-batches for {replicas} replicas: each needs {multiple_of}; make them smaller, and more"
    if at_most and replicas * (at_most // multiple_of) * multiple_of < count:
        return f"{count} micro-batches for {replicas} replicas: they take {at_most} each at most"
    return ""


def equal_shares(count: int, replicas: int, multiple_of: int = 1) -> list[int]:
    """The share of each replica; shares differ by ``multiple_of`` at most."""
    units = count // multiple_of
    ends = [end * units // replicas * multiple_of for end in range(replicas + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def fits(shares: Sequence[int], count: int, replicas: int, multiple_of: int = 1, at_most: int = 0) -> bool:
    """Whether these are possible shares of ``count`` micro-batches."""
    whole = all(share >= multiple_of and share % multiple_of == 0 for share in shares)
    few = not any(0 < at_most < share for share in shares)
    return len(shares) == replicas and sum(shares) == count and whole and few


def share_of(replica: int, shares: Sequence[int]) -> range:
    """The numbers of the micro-batches of one replica, which are consecutive."""
    ends = [0, *accumulate(shares)]
    return range(ends[replica], ends[replica + 1])
