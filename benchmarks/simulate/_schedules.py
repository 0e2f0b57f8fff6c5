"""In which order a pipeline stage runs its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from keepstep.core.errors import UsageError

Schedule = Literal["1f1b", "interleaved", "gpipe", "zero-bubble"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
CHUNKS = 2  # of the model on each rank, interleaved


@dataclass(frozen=True, slots=True)
class Block:
    """One micro-batch through one chunk of the model. ``weights``: the part of backward that nobody waits for."""

    part: Literal["forward", "backward", "weights"]
    micro_batch: int
    chunk: int = 0


def blocks_of(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> list[Block]:
    """The blocks of one stage in order.

    Raises:
        UsageError: interleaved stages need two ranks or more and a multiple of them as micro-batches.
    """
    if schedule == "interleaved":
        return _interleaved(stage, stages, micro_batches)
    if schedule == "gpipe":
        batches = range(micro_batches)
        return [Block("forward", batch) for batch in batches] + [
            Block("backward", batch) for batch in batches
        ]
    warm_up = min(stages - stage - 1, micro_batches)
    order = [Block("forward", batch) for batch in range(warm_up)]
    for batch in range(micro_batches - warm_up):
        order += [Block("forward", warm_up + batch), Block("backward", batch)]
    order += [Block("backward", batch) for batch in range(micro_batches - warm_up, micro_batches)]
    return _with_weights(order, stage, micro_batches) if schedule == "zero-bubble" else order


def _with_weights(order: list[Block], stage: int, micro_batches: int) -> list[Block]:
    """ZB-H1: a stage's weight gradients come ``stage`` backwards late, so they fill what would be bubbles."""
    found: list[Block] = []
    backwards = 0
    for block in order:
        found.append(block)
        if block.part == "backward":
            if backwards >= stage:
                found.append(Block("weights", backwards - stage))
            backwards += 1
    return found + [Block("weights", batch) for batch in range(max(micro_batches - stage, 0), micro_batches)]


def _interleaved(stage: int, stages: int, micro_batches: int) -> list[Block]:
    if stages < 2:
        raise UsageError("interleaved stages on one rank alone: take another schedule, or pp of at least 2")
    if micro_batches % stages:
        raise UsageError(
            f"{micro_batches} micro-batches over {stages} interleaved stages: take a multiple of {stages}"
        )
    total = micro_batches * CHUNKS

    def block(part: Literal["forward", "backward"], place: int) -> Block:
        chunk = place // stages % CHUNKS
        batch = place // (stages * CHUNKS) * stages + place % stages
        return Block(part, batch, chunk if part == "forward" else CHUNKS - 1 - chunk)

    warm_up = min(2 * (stages - stage - 1) + (CHUNKS - 1) * stages, total)
    order = [block("forward", place) for place in range(warm_up)]
    for place in range(total - warm_up):
        order += [block("forward", warm_up + place), block("backward", place)]
    return order + [block("backward", place) for place in range(total - warm_up, total)]
