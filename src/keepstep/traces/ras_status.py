"""The status of a job as NCCL's RAS service tells it.

It tells, of each communicator, how many collectives of each kind every rank has *launched*, which ranks did not answer,
and what went wrong inside NCCL. It does not tell what has ended, and sends and receives are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from keepstep.core.launched import differing

MOST_RANKS = 1 << 17  # ranks of all communicators together

RankStanding = Literal["in", "setting up", "finalizing", "aborting", "not in", "silent", "dead"]

ERRORS = {
    1: "unhandled CUDA error", 2: "system error", 3: "internal error", 4: "invalid argument", 5: "invalid usage",
    6: "remote process error", 8: "timeout",
}  # fmt: skip
"""Errors of NCCL (``ncclResult_t``) in words, without those that are none: 0 success, 7 in progress."""

OF_OTHERS = frozenset({ERRORS[6], ERRORS[8]})
"""Errors that tell of a peer or the network, not of the rank that reports them."""


@dataclass(frozen=True, slots=True)
class RasRank:
    """A rank of a communicator.

    Attributes:
        rank: its number in the communicator, which need not be its rank in the job.
        host, process, gpu: who it is; "", 0 and "" where that is not told.
        counts: collectives launched, by kind as NCCL writes it ("AllReduce"). In text only those kinds are told in
            which ranks differ; "collective" stands for all kinds together.
        standing: *in* the communicator, *setting up* or *finalizing* or *aborting* it, *not in* it (any more);
            *silent*: RAS got no answer from its process; *dead*: it got none for a minute.
        error: what NCCL reports of this rank; "" for nothing.
    """

    rank: int
    host: str = ""
    process: int = 0
    gpu: str = ""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    standing: RankStanding = "in"
    error: str = ""

    @property
    def who(self) -> tuple[str, int, str]:
        """What tells it apart in the whole job."""
        return self.host, self.process, self.gpu


@dataclass(frozen=True, slots=True)
class RasCommunicator:
    """A communicator of ``size`` ranks. ``ranks``: by number; those of which nothing is told are missing."""

    name: str
    size: int
    ranks: Mapping[int, RasRank]

    @property
    def counts(self) -> dict[int, Mapping[str, int]]:
        """The counts of the ranks that are in it, by number, of kinds in which ranks differ; without them, of none."""
        return differing(
            {number: one.counts for number, one in self.ranks.items() if one.standing == "in" and one.counts}
        )


@dataclass(frozen=True, slots=True)
class RasAnswer:
    """An answer. ``is_whole``: all communicators are told with all ranks (JSON), not only what is odd (text).

    ``gpus``: how many GPUs the job has, 0 where that is not told. ``missing``: what could not be told, in words.
    """

    version: str  # NCCL's
    communicators: tuple[RasCommunicator, ...]
    is_whole: bool
    gpus: int = 0
    missing: tuple[str, ...] = ()
