"""Call logs of a TP2·PP2 job: only the times at which hosts called, as MegaTrace records them."""

from __future__ import annotations

import random
from collections.abc import Mapping

from keepstep.core.traced_operations import Call

BATCHES = 4
BLOCK_S = 0.04
OPTIMIZER_S = 0.03
BIG, SMALL = 1 << 24, 1


def call_logs(
    steps: int,
    slow_steps: range,
    factors: Mapping[int, float],
    *,
    seed: int = 0,
    lost: Mapping[int, int] | None = None,
) -> dict[int, list[Call]]:
    """By rank; ``factors``: how much slower a rank is in ``slow_steps``; ``lost``: first steps without records."""
    chance = random.Random(seed)
    logs: dict[int, list[Call]] = {rank: [] for rank in range(4)}
    now = 1000.0
    for step in range(steps):

        def took(rank: int, usual: float, step: int = step) -> float:
            return (
                usual * chance.uniform(0.99, 1.01) * (factors.get(rank, 1.0) if step in slow_steps else 1.0)
            )

        ready = [now, now]  # of the two stages
        calls: dict[int, list[Call]] = {rank: [] for rank in range(4)}
        for _ in range(BATCHES):
            for stage in (0, 1):
                ranks = (2 * stage, 2 * stage + 1)
                if stage:
                    for rank in ranks:
                        calls[rank].append(Call(ready[1], "Recv", BIG))
                    ready[1] = max(ready[1], ready[0])
                begin = ready[stage]
                # the two share every kernel: both go on when the slower has finished
                end = begin + max(took(rank, BLOCK_S) for rank in ranks)
                for rank in ranks:
                    calls[rank].append(Call(begin + 1e-4 * (rank + 1), "AllReduce", BIG))
                    calls[rank].append(Call(begin + 2e-4 * (rank + 1), "AllReduce", BIG))
                    if not stage:
                        calls[rank].append(Call(end + 1e-5 * rank, "Send", BIG))
                ready[stage] = end
        end = max(ready)
        own = {rank: end + took(rank, OPTIMIZER_S) for rank in range(4)}
        for rank in range(4):
            calls[rank].append(Call(end + 1e-5 * rank, "ReduceScatter", BIG + rank // 2))
            calls[rank].append(Call(own[rank], "AllReduce", SMALL))
        now = max(own.values()) + 1e-3
        for rank in range(4):
            calls[rank].append(Call(now + 1e-6 * rank, "AllReduce", SMALL))
            if step >= (lost or {}).get(rank, 0):
                logs[rank] += sorted(calls[rank], key=lambda call: call.at_s)
        now += 1e-3
    return logs
