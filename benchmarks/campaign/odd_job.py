"""A healthy training in which one rank does something long by itself while the others wait: it must not be ended.

Plain PyTorch on Gloo. Nothing here comes from keepstep, and nothing tells keepstep what is going on.
"""

from __future__ import annotations

import datetime
import time

import torch
import torch.distributed as dist
from benchmarks.campaign.notes import Notes
from benchmarks.campaign.odd_draw import draw
from benchmarks.campaign.odd_ways import go_the_way
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    notes = Notes()
    odd = draw(notes.seed)
    notes.began()
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
    rank = dist.get_rank()
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    at_the_end = odd.kind in ("work-on", "export")
    for step in range(odd.steps):
        optimizer.zero_grad()
        time.sleep(0.05)
        model(torch.randn(8, 64)).mean().backward()
        optimizer.step()
        if step == odd.step and not at_the_end and odd.way:
            if rank == odd.rank:
                go_the_way(odd, model.module)
            if odd.wait == "barrier":
                dist.barrier()
            elif odd.wait == "broadcast":
                dist.broadcast(torch.zeros(1), odd.rank)
        notes.step(step)
    if odd.destroys:
        dist.destroy_process_group()
    if at_the_end and (rank == odd.rank) == (odd.kind == "export"):
        go_the_way(odd, model.module)  # converts the last checkpoint, evaluates its share
    notes.done()


if __name__ == "__main__":
    main()
