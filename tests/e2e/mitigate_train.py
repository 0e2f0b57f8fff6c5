"""Trains on micro-batches whose computation is emulated: each takes 4 ms times what FOLDER/slow-REPLICA says.

``mitigate_train.py FOLDER STEPS MICROBATCHES [SECONDS]``. Rank 0 writes FOLDER/steps: per line the step, its seconds,
the shares and the loss, all of it of the whole job. It ends before that many steps when FOLDER/enough is there.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import keepstep

folder, total, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
MICROBATCH_S = float(sys.argv[4]) if len(sys.argv) > 4 else 0.004


def slowness(replica: int) -> float:
    try:
        return float((folder / f"slow-{replica}").read_text())
    except (OSError, ValueError):
        return 1.0


@keepstep.resilient
def train(session: keepstep.Session) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = session.restore(model=model, optimizer=optimizer)
    began_s = time.perf_counter()
    for step in session.steps(start, total):
        sums = torch.zeros(3 + session.world_size, dtype=torch.float64)
        wait_s = MICROBATCH_S * slowness(session.rank)
        for number in session.microbatches(count, model):
            data = torch.randn(4, 8, dtype=torch.float64)
            loss = (model(data) - data.sum(1, keepdim=True)).square().mean() * session.weight
            time.sleep(wait_s)
            loss.backward()
            sums[0] += loss.detach() / session.world_size
            sums[1] += number
            sums[3 + session.rank] += 1
        optimizer.step()
        optimizer.zero_grad()
        sums[2] = session.rank == 0 and (folder / "enough").exists()
        dist.all_reduce(sums)
        now_s = time.perf_counter()
        if session.rank == 0:
            assert int(sums[1]) == count * (count - 1) // 2
            row = [step, now_s - began_s, [int(one) for one in sums[3:]], float(sums[0])]
            with open(folder / "steps", "a") as file:
                file.write(json.dumps(row) + "\n")
        began_s = now_s
        if sums[2]:
            break
    dist.destroy_process_group()


train()
