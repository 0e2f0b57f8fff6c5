"""Operations of a step as other tools record them: the blocks and messages of a pipeline's ranks, and host calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OperationKind = Literal[
    "forward",  # computes one micro-batch
    "backward",
    "forward-send",  # activations to the next stage
    "forward-recv",
    "backward-send",  # gradients to the stage before
    "backward-recv",
    "params-sync",  # collective over the replicas of a stage, before the first forward
    "grads-sync",  # collective over the replicas of a stage, after the last backward
    "embedding-sync",  # collective between the first and the last stage of a replica
    "norm-sync",  # collective over all ranks (gradient norm, clipping)
    "local",  # other work that a rank does for itself at the end of a step
]


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of one rank in one step. Times are seconds on a clock that all ranks share within the step.

    ``index`` counts a rank's operations of one kind in one step, in order. ``local`` operations of different sorts have
    different indices.
    """

    rank: int
    step: int
    replica: int
    stage: int
    kind: OperationKind
    index: int
    start_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a communication function by a rank's host. ``at_s`` is on the log's clock."""

    at_s: float
    function: str
    nbytes: int
