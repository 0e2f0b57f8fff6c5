"""One rank of a small FSDP2 job that saves or loads through DCP: dcp_job.py save|load WHERE REFERENCE MEET."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from keepstep.checkpoint.storage.dcp import DcpReader, DcpWriter


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(11, 10), nn.LayerNorm(10), nn.Linear(10, 7))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * seed)
    for _ in range(2):
        model(torch.ones(4, 11) * seed).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(model, optimizer, options=options)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.equal(b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def main(verb: str, where: str, reference: str, meet: str) -> int:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size)
    model, optimizer = build(1 if verb == "save" else 2)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "epoch": 3 if verb == "save" else 0}
    if verb == "save":
        dcp.save(state, storage_writer=DcpWriter(where, 4))
        saving = dcp.async_save(state, storage_writer=DcpWriter(where, 5))
        assert isinstance(saving, Future)
        saving.result()
        full = whole(model, optimizer)
        if rank == 0:
            torch.save(full, reference)
    else:
        reader = DcpReader(where)
        dcp.load(state, storage_reader=reader)
        assert reader.key == (0, 5)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        full = whole(model, optimizer)
        if rank == 0:
            assert state["epoch"] == 3
            assert same(tuple(full), tuple(torch.load(Path(reference), weights_only=False)))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        code = main(*sys.argv[1:])
    finally:
        # What Gloo's threads still hold of Python's aborts torch 2.13 at the interpreter's end.
        time.sleep(0.2)
    sys.exit(code)
