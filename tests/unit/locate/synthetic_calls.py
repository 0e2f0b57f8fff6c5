"""Call logs of TP2 pipelines: only the times at which hosts called, as MegaTrace records them."""

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


def pipeline_calls(
    steps: int,
    slow_steps: range,
    factors: Mapping[int, float],
    *,
    stages: int = 2,
    seed: int = 0,
    lost: Mapping[int, int] | None = None,
    slow_transfer: int | None = None,
) -> dict[int, list[Call]]:
    """The calls of TP2 stages in a 1F1B pipeline, whose hosts wait for their GPUs after receives and before sends.

    The rest is as in `call_logs`. ``slow_transfer``: messages to and from the stage before this one take a block more
    in ``slow_steps``.
    """
    chance = random.Random(seed)
    logs: dict[int, list[Call]] = {rank: [] for rank in range(2 * stages)}
    now = 1000.0
    for step in range(steps):
        slow = step in slow_steps

        def took(rank: int, usual: float, slow: bool = slow) -> float:
            return usual * chance.uniform(0.99, 1.01) * (factors.get(rank, 1.0) if slow else 1.0)

        calls: dict[int, list[Call]] = {rank: [] for rank in logs}
        free = [now] * stages
        order = [_passes(stage, stages) for stage in range(stages)]
        done: dict[tuple[str, int, int], float] = {}  # pass, stage, micro-batch
        while any(order):
            for stage in range(stages):
                ranks = (2 * stage, 2 * stage + 1)
                while order[stage]:
                    which, batch = order[stage][0]
                    source, to = (stage - 1, stage + 1) if which == "F" else (stage + 1, stage - 1)
                    receives = 0 <= source < stages
                    if receives and (which, source, batch) not in done:
                        break
                    begin = free[stage]
                    if receives:
                        link = BLOCK_S if slow and max(source, stage) == slow_transfer else 0.0
                        for rank in ranks:
                            calls[rank].append(Call(begin + 1e-5 * (rank % 2 + 1), "Recv", BIG))
                        begin = max(begin + 1e-4, done[which, source, batch] + link)
                    end = begin + max(took(rank, BLOCK_S) for rank in ranks)
                    for rank in ranks:
                        calls[rank] += [
                            Call(begin + 1e-4 * at + 1e-6 * rank, "AllReduce", BIG) for at in (1, 2)
                        ]
                        if 0 <= to < stages:
                            calls[rank].append(Call(end + 1e-6 * rank, "Send", BIG))
                    free[stage] = end + 1e-4
                    done[which, stage, batch] = end
                    order[stage].pop(0)
        own: dict[int, float] = {}
        for rank in logs:
            calls[rank].append(Call(free[rank // 2] + 1e-5 * rank, "ReduceScatter", BIG + rank // 2))
            calls[rank].append(Call(free[rank // 2] + 2e-5 * (rank + 1), "AllReduce", SMALL))
            own[rank] = max(free) + took(rank, OPTIMIZER_S)
            calls[rank].append(Call(own[rank], "AllReduce", SMALL))
        now = max(own.values()) + 1e-3
        for rank in logs:
            calls[rank].append(Call(now + 1e-6 * rank, "AllReduce", SMALL))
            if step >= (lost or {}).get(rank, 0):
                logs[rank] += sorted(calls[rank], key=lambda call: call.at_s)
        now += 1e-3
    return logs


def _passes(stage: int, stages: int) -> list[tuple[str, int]]:
    ahead = min(stages - 1 - stage, BATCHES)
    names = "F" * ahead + "FB" * (BATCHES - ahead) + "B" * ahead
    return [(name, names[:place].count(name)) for place, name in enumerate(names)]
