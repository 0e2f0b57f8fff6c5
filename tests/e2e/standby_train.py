"""DDP on Gloo that resumes from its node's cache; writes each step's loss as hex. Arguments: folder, steps, deaths.

Deaths: ``RANK:STEP,…``, one for each incarnation: where that rank writes ``dying-INCARNATION`` with its pid, and waits
to be killed (with ``STOPS`` in the environment it stops itself first).
``STEP_S``: seconds that a step takes more, until there is a file ``hurry`` in the folder.
Gradients are summed in the order of ranks: DDP lays its buckets out anew after a process's first step, and Gloo's own
sums may round differently then.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import keepstep.checkpoint

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
deaths = [tuple(map(int, death.split(":"))) for death in sys.argv[3].split(",") if death]
dist.init_process_group("gloo")
rank, incarnation = dist.get_rank(), int(os.environ["KEEPSTEP_INCARNATION"])
torch.manual_seed(7)


def in_order_of_ranks(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, bucket.buffer())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(torch.stack(parts).sum(0) / len(parts))
    return done


model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
)
model.register_comm_hook(None, in_order_of_ranks)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(rank)
state = {
    "model": model,
    "optimizer": optimizer,
    "data": data.get_state(),
    "random": keepstep.checkpoint.RandomState(),
}
start = keepstep.checkpoint.load(state) or 0
data.set_state(state["data"])
with (folder / f"losses-{rank}").open("a") as log:
    for step in range(start, steps):
        if incarnation < len(deaths) and deaths[incarnation] == (rank, step):
            draft = folder / f".dying-{incarnation}"
            draft.write_text(str(os.getpid()))
            draft.rename(folder / f"dying-{incarnation}")
            if "STOPS" in os.environ:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
        x = torch.randn(16, 32, generator=data)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not (folder / "hurry").exists():
            time.sleep(float(os.environ.get("STEP_S", "0")))
        log.write(f"{step} {float(loss.item()).hex()}\n")
        log.flush()
        state["data"] = data.get_state()
        keepstep.checkpoint.save(state, step + 1)
dist.destroy_process_group()
