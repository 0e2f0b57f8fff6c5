"""`odd_job.py` with accelerate: its loop, its loader, its barrier."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs  # pyright: ignore[reportMissingImports]
from benchmarks.campaign.notes import Notes
from benchmarks.campaign.odd_draw import draw
from benchmarks.campaign.odd_ways import go_the_way
from torch.utils.data import DataLoader, TensorDataset

notes = Notes()
odd = draw(notes.seed)
notes.began()
accelerator = Accelerator(
    cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timedelta(minutes=30))]
)
net = torch.nn.Linear(64, 1)
samples = TensorDataset(torch.randn(4 * odd.nproc * odd.steps, 64))
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), 1e-3), DataLoader(samples, batch_size=4)
)
for step, (x,) in enumerate(loader):
    time.sleep(0.05)
    accelerator.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
    if step == odd.step:
        if notes.rank == odd.rank:
            go_the_way(odd, accelerator.unwrap_model(model))
        if odd.wait == "barrier":
            accelerator.wait_for_everyone()
        elif odd.wait == "broadcast":
            accelerator.gather(torch.ones(1))
    notes.step(step)
if odd.destroys:
    accelerator.end_training()
notes.done()
