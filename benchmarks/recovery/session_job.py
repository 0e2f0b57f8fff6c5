"""The job of the recovery bench as a session: whose process did not fail goes on in it.

Arguments: folder, seconds of a step (emulated by sleeping). The same training as ``job.py``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.recovery.victim import Ballast, misbehave

import keepstep

folder, step_s = Path(sys.argv[1]), float(sys.argv[2])


@keepstep.resilient
def train(session: keepstep.Session) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ballast = Ballast()
    if not (start := session.restore(model=model, optimizer=optimizer, ballast=ballast)):
        ballast.initialise()
    with (folder / f"steps-{session.rank}").open("a") as log:
        for step in session.steps(start, 1 << 40):
            misbehave(folder, session.rank)
            loss = model(torch.full((8, 256), float(step % 7))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            words = os.getpid(), session.incarnation, session.world_size, step + 1, time.monotonic()
            log.write(" ".join(map(str, words)) + "\n")
            log.flush()
            time.sleep(step_s)
            over = torch.tensor(int((folder / "end").exists()))
            dist.all_reduce(over, op=dist.ReduceOp.MIN)
            if over:
                break
    dist.destroy_process_group()


train()
