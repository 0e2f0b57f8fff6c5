"""The training script of each kind of failure, as a user would write it: plain PyTorch on Gloo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Template

from benchmarks.campaign.why_draw import Why

NAME = "train.py"
METRICS = "metrics-{rank}.jsonl"  # a line for each step that a rank has made, beside the script

_SCRIPT = Template('''\
"""Trains a small model."""

import ctypes
import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
$imports

HERE = Path(__file__).parent
CHECKPOINTS = Path("$storage")
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS, BATCH, WIDTH = $steps, 8, 64
CONFIG = {"lr": "0.01", "warmup_steps": 10}
CACHE = []


class Samples(Dataset):
    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.randn(WIDTH), torch.randn(4)


$functions


def train():
    group = dist.group.WORLD
    model = DistributedDataParallel(nn.Sequential(nn.Linear($inputs, 128), nn.ReLU(), nn.Linear(128, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(CONFIG["lr"]))
    metrics = open(HERE / f"metrics-{RANK}.jsonl", "a", buffering=1)
    for step, (x, y) in enumerate(DataLoader(Samples(), batch_size=BATCH, num_workers=$workers)):
        time.sleep(0.05)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        $step
        total = loss.detach().clone()
        dist.all_reduce(total)
        if RANK == 0 and step % 10 == 0:
            print(f"step {step} loss {total.item() / WORLD:.4f}", flush=True)
        metrics.write(json.dumps({"step": step, "unix_s": time.time()}) + "\\n")


def main():
    torch.manual_seed(RANK)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=10)$rendezvous)
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
''')

_WATCHDOG = """\
def watch():
    said = (
        "[PG ID 0 PG GUID 0(default_pg) Rank %d] Process group watchdog thread terminated with exception: "
        "CUDA error: $error\\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might "
        "be incorrect.\\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\\n\\n"
        "Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:43 "
        "(most recent call first):\\n"
        "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f2b1c16c1b6 in libc10.so)\\n"
        "frame #1: c10::cuda::c10_cuda_check_implementation(int, char const*, char const*, int, bool) + 0x118 "
        "(0x7f2b1c5d2a58 in libc10_cuda.so)\\n"
        "frame #2: c10d::ProcessGroupNCCL::WorkNCCL::finishedGPUExecutionInternal() const + 0x56 "
        "(0x7f2acb3f0e66 in libtorch_cuda.so)\\n"
        "frame #3: c10d::ProcessGroupNCCL::watchdogHandler() + 0x61b (0x7f2acb3fc0fb in libtorch_cuda.so)\\n"
    ) % RANK
    clock = time.strftime("%m%d %H:%M:%S") + ".214803917"
    os.write(2, f"[rank{RANK}]:[E{clock} ProcessGroupNCCL.cpp:1895] {said}\\n".encode())
    thrown = "terminate called after throwing an instance of 'c10::DistBackendError'"
    os.write(2, f"{thrown}\\n  what():  {said}\\n".encode())
    os.abort()
"""

_TORCH_SAVE = """\
def save(step):
    torch.save({"step": step, "weights": torch.randn(1 << 16)}, CHECKPOINTS / f"step-{step}-rank-{RANK}.pt")
"""
_WRITE = """\
def save(step):
    with open(CHECKPOINTS / f"step-{step}-rank-{RANK}.bin", "wb") as file:
        for _ in range(4):
            file.write(os.urandom(1 << 16))
        file.flush()
        os.fsync(file.fileno())
"""


@dataclass(frozen=True)
class Part:
    """What a kind of failure puts into the script.

    Attributes:
        step: what is done at the step of the seed, by ``who``; "" is nothing.
        who: "rank", "all", or "" where ``step`` is done by all in each step.
    """

    functions: str = ""
    step: str = ""
    who: str = "rank"
    imports: str = ""
    inputs: str = "WIDTH"
    workers: int = 0
    rendezvous: str = ""


def _watchdog(error: str) -> Part:
    return Part(Template(_WATCHDOG).substitute(error=error), "watch()")


_OOM = """\
def attend(x):
    raise torch.cuda.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.21 GiB is "
        f"free. Process {os.getpid()} has 77.93 GiB memory in use. Of the allocated memory 74.02 GiB is allocated by "
        "PyTorch, and 2.88 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
        "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
        "Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
"""
_ECC = """\
def synchronize():
    time.sleep(0.5)
    raise RuntimeError(
        "CUDA error: uncorrectable ECC error encountered\\n"
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect.\\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\\n"
    )
"""
_GROW = """\
def remember():
    while True:
        CACHE.append(torch.ones(1 << 22))
        time.sleep(0.01)
"""
_PREEMPTED = """\
def on_signal(number, frame):
    print(f"rank {RANK}: got signal {number}, the time is nearly up", flush=True)


signal.signal(signal.SIGUSR1, on_signal)
"""
_EXCEPTIONS = {
    "ValueError": Part("def rate(text):\n    return float(text)\n", 'rate("1e-4,")'),
    "KeyError": Part("def warmup():\n    return CONFIG['warmup_step']\n", "warmup()"),
    "RuntimeError": Part(
        "def collate(samples):\n    return torch.stack(samples)\n",
        "collate([torch.randn(WIDTH), torch.randn(WIDTH - 1)])",
    ),
    "AssertionError": Part(
        'def check(loss):\n    assert torch.isfinite(loss), f"loss is {loss.item()}"\n',
        "check(loss.detach() * float('nan'))",
    ),
}
_SAVES = {"torch.save": Part(_TORCH_SAVE, "save(step)"), "write": Part(_WRITE, "save(step)")}
_BAD_RENDEZVOUS = ', init_method="tcp://{address}:{port}", rank=RANK, world_size=WORLD'
PARTS: Mapping[str, Part | Mapping[str, Part]] = {
    "exception": _EXCEPTIONS,
    "import": {
        "no module": Part(imports="import flash_attn_3_rotary"),
        "no name": Part(imports="from torch.nn import FlashRotaryAttention"),
    },
    "syntax": Part(functions="def scheduler(step:\n    return 1.0\n"),
    "shape": Part(inputs="WIDTH + 1"),
    "gpu memory": Part(_OOM, "attend(x)"),
    "watchdog, illegal access": _watchdog("an illegal memory access was encountered"),
    "watchdog, ECC": _watchdog("uncorrectable ECC error encountered"),
    "segfault": Part("def kernel():\n    ctypes.string_at(0)\n", "kernel()"),
    "OOM killer": Part(_GROW, "remember()"),
    "disk full": _SAVES,
    "disk full, all": Part(_WRITE, "save(step)", "all"),
    "quota": _SAVES,
    "no mount": _SAVES,
    "mount lost": Part(_WRITE, "save(step)"),
    "storage stalls": Part(_WRITE, "save(step)"),
    "port taken": Part(rendezvous=_BAD_RENDEZVOUS),
    "link cut": Part(),
    "desync": {
        "operation": Part(step="dist.broadcast(torch.ones(16), RANK, group=group)"),
        "size": Part(step="dist.all_reduce(torch.ones(16), group=group)"),
    },
    "loader killed": Part(workers=1),
    "time limit": {"TERM": Part(), "USR1, TERM": Part(functions=_PREEMPTED)},
    "Xid": Part(_ECC, "synchronize()"),
}


def script(why: Why, storage: str = "checkpoints", address: str = "", port: int = 0) -> str:
    """The seed's script; it saves in ``storage``. At ``address`` and ``port`` meet the ranks of "port taken"."""
    found = PARTS[why.kind]
    part = found if isinstance(found, Part) else found[why.way]
    who = f"RANK == {why.rank} and " if part.who == "rank" else ""
    step = f"if {who}step == {why.step}:\n            {part.step}" if part.step else ""
    return _SCRIPT.substitute(
        imports=part.imports,
        storage=storage,
        steps=why.steps,
        functions=part.functions,
        inputs=part.inputs,
        workers=part.workers,
        step=step,
        rendezvous=part.rendezvous.format(address=address, port=port),
    ).replace("\n        \n", "\n")
