"""A resilient training of two ranks: in its third step rank 1 asks for a file that is never told of, then rank 0 fails.

Arguments: the file, one that is there once rank 1 has asked for it, and one with the steps that rank 1 has done.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import keepstep

asked, is_asked, done = (Path(one) for one in sys.argv[1:])


@keepstep.resilient
def train(session: keepstep.Session) -> None:
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = session.restore(model=model, optimizer=optimizer)
    for step in session.steps(start, 6):
        loss = model(torch.ones(2, 4)).square().mean()
        torch.distributed.all_reduce(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and session.incarnation == 0:
            if session.rank == 1:
                asked.exists()
            while not is_asked.exists():
                time.sleep(0.01)
            os._exit(3)
        if session.rank == 1:
            with done.open("a") as file:
                file.write(f"{step}\n")


train()
