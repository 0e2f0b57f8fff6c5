"""What the nodes of a simulated job send each other."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulate._faults import Fault
from benchmarks.simulate._replay import BYTES, Durations
from keepstep.core.layout import ParallelLayout


def sent_in_a_step(
    layout: ParallelLayout, ranks_per_node: int, micro_batches: int, usual: Durations
) -> dict[tuple[int, int], tuple[float, float]]:
    """(bytes, seconds with data under way) of every pair of nodes; the gradients go around in rings."""
    nodes = np.arange(layout.world_size) // ranks_per_node
    grid = np.reshape(nodes, (layout.pp, layout.dp, layout.tp))
    found: dict[tuple[int, int], tuple[float, float]] = {}

    def add(here: NDArray[np.int64], there: NDArray[np.int64], nbytes: float, seconds: float) -> None:
        pairs, counts = np.unique(np.stack([here.ravel(), there.ravel()], axis=1), axis=0, return_counts=True)
        for (source, target), count in zip(pairs.tolist(), counts.tolist(), strict=True):
            if source != target:
                old = found.get((source, target), (0.0, 0.0))
                found[source, target] = (old[0] + count * nbytes, old[1] + count * seconds)

    for stage in range(layout.pp - 1):
        for here, there in ((grid[stage], grid[stage + 1]), (grid[stage + 1], grid[stage])):
            add(here, there, micro_batches * BYTES["pp"], micro_batches * usual.message_s)
    if layout.dp > 1:
        add(grid, np.roll(grid, -1, axis=1), 2.0 * BYTES["dp"], usual.dp_s)
    return found


def slower(fault: Fault, source: int, target: int, ranks_per_node: int, micro_batches: int) -> float:
    """Seconds that a fault adds to the time with data under way between two nodes, per step."""
    if fault.where not in ("message", "link") or not math.isfinite(fault.delay_s):
        return 0.0
    ends = fault.rank // ranks_per_node, fault.peer // ranks_per_node
    if (source, target) != ends and (fault.where == "message" or (target, source) != ends):
        return 0.0
    once = fault.where == "message" and fault.micro_batch >= 0
    return fault.delay_s * (1 if once else micro_batches)


def address(node: int) -> str:
    """A node's address, which nothing listens at."""
    return f"10.{node >> 16}.{node >> 8 & 255}.{node & 255}"
