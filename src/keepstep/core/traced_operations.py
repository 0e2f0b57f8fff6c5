"""A step's operations as other tools record them: what a pipeline's ranks computed and sent, start and duration."""

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
    "grads-sync",  # the same after the last backward
    "embedding-sync",  # collective between the first and the last stage of a replica
    "norm-sync",  # collective over all ranks (gradient norm, clipping)
    "local",  # anything else that a rank does for itself at the end of a step
]


@dataclass(frozen=True, slots=True)
class Operation:
    """``index`` counts operations of one kind of one rank in one step, in order; ``local`` ones of different sorts have
    different numbers. Seconds, on one clock per step.
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
    """A rank's host called a communication function. ``nbytes`` as the log has it; seconds on the log's clock."""

    at_s: float
    function: str
    nbytes: int
