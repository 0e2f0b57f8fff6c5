"""`odd_job.py` with FSDP2 whose parameters are offloaded to the CPU."""

from __future__ import annotations

import datetime
import time

import torch
import torch.distributed as dist
from benchmarks.campaign.notes import Notes
from benchmarks.campaign.odd_draw import draw
from benchmarks.campaign.odd_ways import go_the_way
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

notes = Notes()
odd = draw(notes.seed)
notes.began()
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
offload = CPUOffloadPolicy(pin_memory=False)  # without a GPU there is nothing to pin memory for
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)), torch.nn.Linear(64, 1))
for layer in model:
    fully_shard(layer, mesh=mesh, offload_policy=offload)
fully_shard(model, mesh=mesh, offload_policy=offload)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
aside = torch.nn.Linear(64, 1)  # what an own evaluation runs: a forward of the model gathers its shards
for step in range(odd.steps):
    optimizer.zero_grad()
    time.sleep(0.05)
    model(torch.randn(8, 64)).mean().backward()
    optimizer.step()
    if step == odd.step:
        if notes.rank == odd.rank:
            go_the_way(odd, aside)
        if odd.wait == "barrier":
            dist.barrier()
        elif odd.wait == "broadcast":
            dist.broadcast(torch.zeros(1), odd.rank)
    notes.step(step)
if odd.destroys:
    dist.destroy_process_group()
notes.done()
