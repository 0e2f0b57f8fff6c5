"""A small DDP training script for the agent's end-to-end tests: knows nothing of keepstep, keeps its own step clock.

Compute is emulated by sleeping. Arguments: steps, file for the clock, optional ``slow=RANK:FIRST:FACTOR``,
``hang=RANK:STEP``, ``evaluate=EVERY``.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class EmulatedCompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, seconds, hangs):
        ctx.seconds, ctx.hangs = seconds, hangs
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(3600 if ctx.hangs else 2 * ctx.seconds)
        return gradient, None, None


def main() -> None:
    steps, clock_file = int(sys.argv[1]), sys.argv[2]
    options = dict(word.split("=", 1) for word in sys.argv[3:])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    slow_rank, slow_from, slow_factor = (options.get("slow") or "-1:0:1").split(":")
    hang_rank, hang_step = (int(word) for word in (options.get("hang") or "-1:-1").split(":"))
    every = int(options.get("evaluate") or 0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock: list[float] = []
    for step in range(steps):
        if every and step and step % every == 0:
            model.eval()
            with torch.no_grad():
                time.sleep(0.1)
                loss = model(torch.ones(4, 32)).sum()
                dist.all_reduce(loss)
            model.train()
        began = time.monotonic()
        seconds = 0.02 * (float(slow_factor) if rank == int(slow_rank) and step >= int(slow_from) else 1.0)
        hangs = rank == hang_rank and step == hang_step
        loss = model(EmulatedCompute.apply(torch.ones(4, 32, requires_grad=True), seconds, hangs)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.append(time.monotonic() - began)
        if step % 5 == 4 or step == steps - 1:
            with open(f"{clock_file}.{rank}.{os.getpid()}", "w") as file:
                json.dump(clock, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
