"""A small job in which those that die first are not at fault. ``victims_job.py RUN HOW RANK``: what which rank does."""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RUN, HOW, ODD = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
TIMEOUTS_S = {"sleeps": 6, "hangs": 45}
STEPS = 30


def save(rank: int) -> None:
    if rank == ODD:
        time.sleep(0.01)
    dist.barrier()


def batches(rank: int):
    for step in range(STEPS):
        if rank == ODD and step == 20 and HOW in TIMEOUTS_S:
            time.sleep(120)
        yield torch.randn(8, 16)


def is_watched() -> bool:
    try:
        nodes = json.loads((RUN / "status.json").read_text())["nodes"]
    except (OSError, ValueError):
        return False
    return bool(nodes) and all(node["agent"] == "ok" for node in nodes)


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUTS_S.get(HOW, 60)))
    rank = dist.get_rank()
    while not is_watched():  # all ranks see it within a second
        time.sleep(0.1)
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
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=6), wait_all_ranks=True)
    if HOW == "one more" and rank == ODD:
        save(rank)
    if HOW != "works on":
        dist.barrier()
    elif rank == ODD:
        time.sleep(6)  # exports, while the others have ended


main()
