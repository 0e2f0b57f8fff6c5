"""A training (DDP) whose rank 1 is killed once; after the restart rank 0 sleeps in a forward. It is slow to end."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FIRST = os.environ["KEEPSTEP_INCARNATION"] == "0"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.step = torch.nn.Linear(4, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        if FIRST and self.step == 40 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if not FIRST and self.step == 20 and dist.get_rank() == 0:
            time.sleep(1000)
        return self.layer(x)


dist.init_process_group("gloo")
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for _ in range(80):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
finally:
    time.sleep(3)
