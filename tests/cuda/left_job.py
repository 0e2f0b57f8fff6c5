"""A training on NCCL without a Session, whose rank 1 is stopped, or leaves with exit code 0, in step 12.

python left_job.py KIND        "stop" or "leave"
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS, AT = 40, 12


def main(kind: str) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    model = DistributedDataParallel(torch.nn.Linear(32, 8).cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        if step == AT and rank == 1:
            torch.cuda.synchronize()
            if kind == "leave":
                os._exit(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        model(torch.ones(4, 32).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1])
