"""What can be wrong with a simulated job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Where = Literal[
    "forward",  # a block of ``rank``: ``micro_batch``, or all when -1
    "backward",
    "data",
    "optimizer",
    "compute",  # all that ``rank`` computes
    "message",  # from ``rank`` to ``peer``: of ``micro_batch``, or all when -1
    "link",  # every message and every ring between the nodes of ``rank`` and ``peer``
    "tp",  # the tensor-parallel group of ``rank``: in the forward of ``micro_batch``, or always when -1
    "dp",  # the gradient reduction of the group of ``rank``
]


@dataclass(frozen=True, slots=True)
class Fault:
    """One cause, from ``first_step`` to ``last_step`` (both included).

    ``delay_s`` is added to each operation it hits, infinite for a hang; ``factor`` stretches it. ``node``: all ranks of
    the node of ``rank``, as a starved CPU does. ``dies``: the process of a hang is gone. ``skips``: ``rank`` leaves out
    its last collective of the step in the group of ``where`` ("tp" or "dp") and goes on.
    """

    where: Where
    rank: int
    peer: int = -1
    micro_batch: int = -1
    delay_s: float = 0.0
    factor: float = 1.0
    first_step: int = 0
    last_step: int = 1 << 30
    node: bool = False
    dies: bool = False
    skips: bool = False
