"""A small job in which those that die first are not at fault. ``victims_job.py HOW RANK``: what which rank does."""

from __future__ import annotations

import datetime
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

HOW, ODD = sys.argv[1], int(sys.argv[2])
TIMEOUTS_S = {"sleeps": 4, "hangs": 20}
STEPS = 30


def save(rank: int) -> None:
    if rank == ODD:
        time.sleep(0.01)
    dist.barrier()


def batches(rank: int):
    for step in range(STEPS):
        if rank == ODD and step == 20 and HOW in TIMEOUTS_S:
            time.sleep(60)
        yield torch.randn(8, 16)


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUTS_S.get(HOW, 60)))
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step, batch in enumerate(batches(rank)):
        if rank == ODD and step == 20 and HOW == "leaves":
            sys.exit(0)
        optimizer.zero_grad()
        time.sleep(0.05)
        model(batch).mean().backward()
        optimizer.step()
        if HOW == "is late" and step == 20:
            if rank == ODD:
                time.sleep(30)
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=4), wait_all_ranks=True)
    if HOW == "one more" and rank == ODD:
        save(rank)
    if HOW != "works on":
        dist.barrier()
    elif rank == ODD:
        time.sleep(6)  # exports, while the others have ended


main()
