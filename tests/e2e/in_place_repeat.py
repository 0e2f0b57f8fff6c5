"""Trains until it is told to leave, over and over; says after each first step what its process holds.

Arguments: folder, kind. See ``in_place_train.py`` for kinds.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import keepstep

folder, kind = Path(sys.argv[1]), sys.argv[2]


def held() -> dict[str, int]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "kibibytes": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
    }


@keepstep.resilient
def train(session: keepstep.Session) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 1))
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    start = session.restore(model=model, optimizer=optimizer)
    for step in session.steps(start, 1 << 40):
        model(torch.ones(8, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == start + 1:
            said = {**held(), "at": time.monotonic()}
            draft = folder / f".{session.rank}-{session.incarnation}"
            draft.write_text(json.dumps(said))
            draft.rename(folder / f"{session.rank}-{session.incarnation}")


train()
