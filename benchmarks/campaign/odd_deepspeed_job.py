"""`odd_job.py` with DeepSpeed, ZeRO-1 to 3 by the seed."""

from __future__ import annotations

import os
import time
from datetime import timedelta

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it at its import
os.environ.setdefault("DS_BUILD_OPS", "0")

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from benchmarks.campaign.notes import Notes
from benchmarks.campaign.odd_draw import draw
from benchmarks.campaign.odd_ways import go_the_way

notes = Notes()
odd = draw(notes.seed)
notes.began()
# Not compiled at first use, a minute on each machine: everything goes over Gloo.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="gloo", verbose=False, timeout=timedelta(minutes=30))
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1 + notes.seed % 3},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
    "steps_per_print": 1 << 30,
}
engine, _, _, _ = deepspeed.initialize(
    model=net, optimizer=torch.optim.AdamW(net.parameters(), 1e-3), config=config
)
aside = torch.nn.Linear(64, 1)  # what an own evaluation runs: ZeRO-3 has the engine's in shards
for step in range(odd.steps):
    time.sleep(0.05)
    engine.backward(engine(torch.randn(8, 64, dtype=torch.bfloat16)).float().mean())
    engine.step()
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
