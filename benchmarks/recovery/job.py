"""The job of the recovery bench: small DDP on Gloo, a state to go on from after every step, a line for each step.

Arguments: folder, seconds of a step (emulated by sleeping). Runs under keepstep and under torchrun: under keepstep the
state is in the node's memory (``keepstep.checkpoint``), elsewhere in a file on tmpfs, written with ``torch.save``.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.recovery.victim import Ballast, misbehave

folder, step_s = Path(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer, "ballast": (ballast := Ballast())}
in_memory = "KEEPSTEP_CACHE" in os.environ
file = Path("/dev/shm") / f"{folder.name}-{rank}.pt"


def load() -> int:
    if in_memory:
        import keepstep.checkpoint

        return keepstep.checkpoint.load(state) or 0
    found = torch.load(file) if file.exists() else {"step": 0}
    steps = torch.tensor(found["step"])
    dist.all_reduce(
        steps, op=dist.ReduceOp.MIN
    )  # as far as all have it: that is what a bench needs of a resume
    for name, of in state.items():
        if name in found:
            of.load_state_dict(found[name])
    return int(steps)


def save(step: int) -> None:
    if in_memory:
        import keepstep.checkpoint

        keepstep.checkpoint.save(state, step)
        return
    draft = file.with_suffix(".draft")
    torch.save({"step": step, **{name: of.state_dict() for name, of in state.items()}}, draft)
    draft.replace(file)


epoch = int(os.environ.get("KEEPSTEP_INCARNATION") or os.environ["TORCHELASTIC_RESTART_COUNT"])
if not (step := load()):
    ballast.initialise()
with (folder / f"steps-{rank}").open("a") as log:
    while True:
        misbehave(folder, rank)
        loss = model(torch.full((8, 256), float(step % 7))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log.write(f"{os.getpid()} {epoch} {dist.get_world_size()} {step} {time.monotonic()}\n")
        log.flush()
        save(step)
        time.sleep(step_s)
        over = torch.tensor(int((folder / "end").exists()))
        dist.all_reduce(over, op=dist.ReduceOp.MIN)
        if over:
            break
file.unlink(missing_ok=True)
dist.destroy_process_group()
