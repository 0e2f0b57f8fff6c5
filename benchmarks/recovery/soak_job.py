"""The job of the soak: a session that draws its data and its dropout at random, and says where each of its ranks is.

Arguments: folder, steps, seconds of a pause after each (0: none). In the folder, by rank: ``mark-R`` (a page: see
``_checkpoint_job.Mark``), ``steps-R`` (process, incarnation, step and CLOCK_MONOTONIC of each step) and ``loss-R``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.checkpoint_faults.job import Mark, Phase
from benchmarks.recovery.victim import misbehave

import keepstep

folder, total, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


class Data:
    """Batches drawn from a generator, and where in them we are."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(rank)

    def next(self) -> torch.Tensor:
        return torch.randn(8, 64, generator=self._generator)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._generator.set_state(state["generator"])


@keepstep.resilient
def train(session: keepstep.Session) -> None:
    """The training."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = session.rank
    mark = Mark(folder / f"mark-{rank}")
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1)),
        find_unused_parameters=True,  # keeps the buckets, and so the order of sums, the same after a restart
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Data(rank)
    mark.put(Phase.RESTORE, session.incarnation)
    start = session.restore(model=model, optimizer=optimizer, data=data)
    with (
        (folder / f"steps-{rank}").open("a", buffering=1) as log,
        (folder / f"loss-{rank}").open("a", buffering=1) as losses,
    ):
        for step in session.steps(start, total):
            mark.put(Phase.TRAIN, step)
            misbehave(folder, rank)
            x = data.next()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            mark.put(Phase.STEP, step)
            optimizer.step()
            optimizer.zero_grad()
            mark.put(Phase.SAVE, step)
            losses.write(f"{step} {loss.item().hex()}\n")
            log.write(f"{os.getpid()} {session.incarnation} {step} {time.monotonic()}\n")
            if pause_s:
                time.sleep(pause_s)
    dist.destroy_process_group()


train()
