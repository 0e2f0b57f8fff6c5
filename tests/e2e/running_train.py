"""Ranks on Gloo that train until there is a file ``end``, for orders on a running job. Arguments: folder, what it does.

``save``: each step is saved with `keepstep.checkpoint`; ``profiles``: rank 0 uses torch's profiler itself. While there
is a file ``slow`` rank 1 takes three times as long for a step, while there is one named ``stand`` it does nothing.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import keepstep.checkpoint

STEP_S = 0.06
folder, does = Path(sys.argv[1]), sys.argv[2:]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
state: dict[str, Any] = {"model": model, "optimizer": optimizer}
step = (keepstep.checkpoint.load(state) or 0) if "save" in does else 0
own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) if "profiles" in does else None
over = torch.zeros(1)
while not over.item():
    while (folder / "stand").exists() and rank == 1:
        time.sleep(0.05)
    x = torch.randn(4, 16)
    loss = model(x).square().mean()
    time.sleep(STEP_S * (3 if rank == 1 and (folder / "slow").exists() else 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if "save" in does:
        keepstep.checkpoint.save(state, step)
    over.fill_((folder / "end").exists())
    dist.all_reduce(over)
    (folder / f"steps-{rank}").write_text(str(step))
del own
dist.destroy_process_group()
