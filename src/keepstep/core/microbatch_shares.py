"""How the micro-batches of a step are divided among the replicas of a model: what workers tell, and are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Split:
    """How one rank's job divides each global batch, from ``step`` on.

    Attributes:
        rank: that tells it.
        incarnation: of the job.
        count: micro-batches in a step, of all replicas.
        replica: that the rank is part of, from 0.
        replicas: how many there are.
        multiple_of: what each share is a multiple of.
        at_most: of one share; 0: no bound.
        number: of the shares that were ordered and are in force; 0: they are equal.
        step: the first that was divided so.
        share: of the rank's replica.
        movable: whether another replica could have more and this one fewer: not where they meet in each micro-batch.
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
    """Why this many micro-batches cannot be divided among so many replicas; "": they can."""
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
    """Shares that differ by ``multiple_of`` at most."""
    units = count // multiple_of
    ends = [end * units // replicas * multiple_of for end in range(replicas + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def fits(shares: Sequence[int], count: int, replicas: int, multiple_of: int = 1, at_most: int = 0) -> bool:
    """Whether these are shares of ``count`` micro-batches at all."""
    return (
        len(shares) == replicas
        and sum(shares) == count
        and all(
            share >= multiple_of and share % multiple_of == 0 and not 0 < at_most < share for share in shares
        )
    )


def share_of(replica: int, shares: Sequence[int]) -> range:
    """The numbers of the micro-batches of one replica: they follow each other."""
    ends = [0, *accumulate(shares)]
    return range(ends[replica], ends[replica + 1])
