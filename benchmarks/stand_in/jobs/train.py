"""A training on the stand-in GPU in one of several layouts. The host runs ahead, and the script never synchronises.

    python train.py [--layout LAYOUT] [--steps N] [--layers N] [--width N] [--backend nccl|nccl2] [--real]

LAYOUT is one of torch's, ``ddp``, ``fsdp2``, ``pipeline`` (layouts.py), or ``megatron``, ``deepspeed``
(framework_layouts.py), whose hosts wait for their device.

``pipeline`` is two stages by as many replicas as there are pairs of ranks, with torch.distributed.pipelining's 1F1B.
Each step ends with a small all-reduce, as of a gradient's norm, and a mark in the device's log.
``--real``: on a GPU that is there, where a layer's pass takes ``--layer-us`` (benchmarks/gpu/device.py).
"""

from __future__ import annotations

import argparse
import json
import os
import time
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.gpu.device import RealDevice, take_device
from benchmarks.stand_in.device import Device, compute_values
from benchmarks.stand_in.faults import Script
from benchmarks.stand_in.jobs.framework_layouts import FRAMEWORKS
from benchmarks.stand_in.jobs.layouts import PLAIN
from torch.utils.data import DataLoader, Dataset

LAYOUTS = {**PLAIN, **FRAMEWORKS}
MARKS = "STAND_IN_LOG"  # the folder for marks


class Steps(Dataset[int]):
    """The numbers of the steps; each begins with its data."""

    def __init__(self, steps: int, script: Script, stream: int) -> None:
        self.steps, self.script, self.stream = steps, script, stream

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> int:
        if step >= self.steps:
            raise IndexError(step)
        self.script.begin(step, self.stream)
        self.script.at(step, "data")
        return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--bucket-mb", type=float, default=0.02)
    parser.add_argument("--backend", default="nccl")
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--layer-us", type=float, default=3000)
    parser.add_argument(
        "--memory-gb", type=float, default=0, help="memory of the device that it takes besides"
    )
    parser.add_argument("--pace-s", type=float, default=0, help="least time of a host's step on the wall")
    parser.add_argument(
        "--tell-parameters", action="store_true", help="a fixed seed, and a checksum of them at the end"
    )
    arguments = parser.parse_args()

    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if not arguments.real:
        compute_values()
    take_device(local_rank, int(os.environ["WORLD_SIZE"]))
    if arguments.tell_parameters:
        torch.manual_seed(0)  # the device's generator has a random seed otherwise
    dist.init_process_group(arguments.backend, timeout=timedelta(seconds=arguments.timeout_s))
    device = RealDevice(arguments.layer_us) if arguments.real else Device()
    script = Script.from_environment(device, rank)
    layout = LAYOUTS[arguments.layout](arguments, script)
    if isinstance(device, RealDevice):
        device.load(layout.module)
    kept = torch.empty(int(arguments.memory_gb * 2**30), dtype=torch.uint8, device="cuda")
    optimizer, torch_optimizer = layout.make_optimizer()
    torch_optimizer.register_step_pre_hook(lambda *_: script.at(layout.step, "optimizer"))
    norm = torch.zeros(1, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream

    for step in DataLoader(Steps(arguments.steps, script, stream), batch_size=None):
        layout.step = step
        next_s = time.monotonic() + arguments.pace_s
        layout.forward_backward()
        script.at(step, "reduce")
        if script.says("order", step):
            dist.broadcast(norm, 0)
        elif not script.says("skip", step):
            dist.all_reduce(norm)
        optimizer.step()
        device.mark(stream, step)
        optimizer.zero_grad()
        script.at(step, "checkpoint")
        time.sleep(max(next_s - time.monotonic(), 0))
    counts = device.counts()
    torch.cuda.synchronize()
    del kept
    if isinstance(device, RealDevice) and MARKS in os.environ:
        device.write_marks(Path(os.environ[MARKS], f"rank-{rank}"))
    if arguments.tell_parameters:
        told = 0
        for parameter in layout.parameters():
            local = getattr(parameter, "to_local", lambda kept=parameter: kept)()
            told = zlib.crc32(local.detach().cpu().numpy().tobytes(), told)
        print(f"rank {rank} ends with parameters {told:08x}", flush=True)
    print(f"rank {rank} is done, its process called {json.dumps(counts)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
