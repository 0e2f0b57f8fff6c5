"""Steps of a 1F1B pipeline, run by a plain event loop that knows nothing of any analysis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from keepstep.core.traced_operations import Operation, OperationKind

Block = Literal["forward", "backward"]
SEND: dict[Block, OperationKind] = {"forward": "forward-send", "backward": "backward-send"}
RECV: dict[Block, OperationKind] = {"forward": "forward-recv", "backward": "backward-recv"}


def order(stage: int, stages: int, batches: int) -> list[tuple[Block, int]]:
    """Blocks of one rank in 1F1B order."""
    warm = min(stages - stage - 1, batches)
    blocks: list[tuple[Block, int]] = [("forward", index) for index in range(warm)]
    for index in range(batches - warm):
        blocks.extend([("forward", warm + index), ("backward", index)])
    blocks.extend([("backward", index) for index in range(batches - warm, batches)])
    return blocks


def pipeline_step(
    step: int,
    stages: int,
    replicas: int,
    batches: int,
    lasts: Callable[[int, str, int], float],
    message_s: float,
) -> tuple[list[Operation], float]:
    """All operations of one step, and its time. ``lasts(rank, kind, index)``: seconds of a block or a collective."""
    found: list[Operation] = []
    grads_ready: dict[int, list[tuple[int, float]]] = {}
    for replica in range(replicas):
        ends: dict[tuple[int, str, int], float] = {}
        blocks = {stage: order(stage, stages, batches) for stage in range(stages)}
        free: dict[int, float] = {}
        for stage in range(stages):
            rank = stage * replicas + replica
            last = lasts(rank, "params-sync", 0)
            found.append(Operation(rank, step, replica, stage, "params-sync", 0, 0.0, last))
            free[stage] = last
        while any(blocks.values()):
            for stage in range(stages):
                if not blocks[stage]:
                    continue
                kind, index = blocks[stage][0]
                source = stage - 1 if kind == "forward" else stage + 1
                rank = stage * replicas + replica
                begin = free[stage]
                if 0 <= source < stages:
                    sent = ends.get((source, kind, index))
                    if sent is None:
                        continue
                    peer = source * replicas + replica
                    arrived = max(sent + message_s, begin)
                    found.append(Operation(peer, step, replica, source, SEND[kind], index, sent, message_s))
                    found.append(Operation(rank, step, replica, stage, RECV[kind], index, sent, message_s))
                    begin = arrived
                blocks[stage].pop(0)
                last = lasts(rank, kind, index)
                found.append(Operation(rank, step, replica, stage, kind, index, begin, last))
                ends[stage, kind, index] = free[stage] = begin + last
        for stage in range(stages):
            grads_ready.setdefault(stage, []).append((replica, free[stage]))
    step_s = 0.0
    for stage, ready in grads_ready.items():
        last_in = max(at for _, at in ready)
        for replica, at in ready:
            rank = stage * replicas + replica
            end = last_in + lasts(rank, "grads-sync", 0)
            found.append(Operation(rank, step, replica, stage, "grads-sync", 0, at, end - at))
            step_s = max(step_s, end)
    return found, step_s


def interleaved_step(
    step: int, batches: int, lasts: Callable[[int, str, int], float], message_s: float
) -> tuple[list[Operation], float]:
    """Two ranks with two chunks of the model each: what the second sends on goes back to the first."""
    order_of: list[tuple[Block, int, int]] = [("forward", c, b) for c in (0, 1) for b in range(batches)]
    order_of.extend([("backward", c, b) for c in (1, 0) for b in range(batches)])
    blocks = {rank: list(order_of) for rank in (0, 1)}
    free = {0: 0.0, 1: 0.0}
    counts: dict[tuple[int, str], int] = {}
    sent: dict[tuple[str, int, int], float] = {}  # kind, virtual stage, batch: end of the block
    found: list[Operation] = []

    def number(rank: int, kind: str) -> int:
        counts[rank, kind] = counts.get((rank, kind), -1) + 1
        return counts[rank, kind]

    while any(blocks.values()):
        for rank in (0, 1):
            if not blocks[rank]:
                continue
            kind, chunk, batch = blocks[rank][0]
            virtual = 2 * chunk + rank
            source = virtual - 1 if kind == "forward" else virtual + 1
            begin = free[rank]
            if 0 <= source < 4:
                at = sent.get((kind, source, batch))
                if at is None:
                    continue
                index = number(rank, RECV[kind])
                found.append(Operation(rank, step, 0, rank, RECV[kind], index, at, message_s))
                begin = max(begin, at + message_s)
            blocks[rank].pop(0)
            index = number(rank, kind)
            last = lasts(rank, kind, index)
            found.append(Operation(rank, step, 0, rank, kind, index, begin, last))
            free[rank] = sent[kind, virtual, batch] = begin + last
            target = virtual + 1 if kind == "forward" else virtual - 1
            if 0 <= target < 4:
                number_ = number(rank, SEND[kind])
                found.append(Operation(rank, step, 0, rank, SEND[kind], number_, begin + last, message_s))
    return found, max(free.values())
