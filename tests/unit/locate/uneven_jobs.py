"""Made-up jobs for tests: ranks on GPUs that reduce once an iteration, and whose work may differ from step to step."""

from __future__ import annotations

import random
from collections.abc import Callable

from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Diagnosis
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary
from keepstep.locate import locate_slow

OWN_S, TRANSFER_S, ONSET = 0.1, 0.01, 16
Work = Callable[[random.Random, int, int], float]  # how many times its healthy time a rank takes: rank, step
Rows = list[IterationSummary]


def lengths(draw: random.Random, rank: int, step: int) -> float:
    """Sequences of any length on each rank in each step."""
    return draw.uniform(1, 6)


def few_long_ones(draw: random.Random, rank: int, step: int) -> float:
    return 1.0 + draw.expovariate(1.0)


def pauses(draw: random.Random, rank: int, step: int) -> float:
    """A host that pauses in each third step, by chance."""
    return 5.0 if draw.random() < 1 / 3 else 1.0


def one_is_slow(factor: float) -> Work:
    """Rank 1, from the onset on."""
    return lambda draw, rank, step: factor if rank == 1 else 1.0


def turns(world: int) -> Work:
    return lambda draw, rank, step: 6.0 if step % world == rank else 1.0


def uneven_job(world: int, work: Work, seed: int, steps: int, *, noise: float = 0.01) -> Rows:
    """All iterations of all ranks; the work is even until the onset."""
    draw, rows = random.Random(seed), Rows()
    for step in range(steps):
        times = [work(draw, rank, step) if step >= ONSET else 1.0 for rank in range(world)]
        own = [OWN_S * one * max(draw.gauss(1.0, noise), 0.5) for one in times]
        duration = max(own) + TRANSFER_S
        for rank in range(world):
            busy = duration - own[rank]
            stream = StreamSummary(
                "nccl-1",
                int(Op.ALLREDUCE),
                -1,
                1,
                1 << 20,
                step + 1,
                own[rank],
                duration,
                busy,
                busy,
                TRANSFER_S,
            )
            rows.append(
                IterationSummary(
                    rank, step, float(step), duration, own[rank], busy, ahead_s=0.5, streams=(stream,)
                )
            )
    return rows


def verdict(world: int, rows: Rows, until: int) -> Diagnosis:
    """Who is named once the iterations before ``until`` are known."""
    ranks = tuple(range(world))
    groups = {
        "0": GroupInfo("0", ranks, "cuda:nccl"),
        "nccl-1": GroupInfo("nccl-1", ranks, "nccl", serves="0"),
    }
    before = [row for row in rows if row.step < ONSET - 2]
    after = [row for row in rows if ONSET <= row.step < until]
    nodes = {rank: f"node-{rank}" for rank in ranks}
    return locate_slow(Evidence(groups, nodes, before=before, after=after, onset_step=ONSET))


def surely_named(found: Diagnosis) -> list[int]:
    return [one.rank for one in found.culprits if one.rank is not None and one.confidence != "low"]
