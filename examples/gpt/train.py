"""Trains a byte-level GPT on Python's own sources with data, tensor and pipeline parallelism.

torchrun --nproc-per-node 4 examples/gpt/train.py --dp 2 --pp 2
keepstep run --nproc-per-node 4 examples/gpt/train.py --dp 2 --pp 2 --emulate-compute-ms 20
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from checkpoint import Checkpoints
from compute import Compute, Faults, NoFaults
from data import VOCABULARY, batches, standard_library_text
from model import Shape
from parallel import Piped, Sizes, Whole, build_stages, make_mesh
from torch import Tensor


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument_group("who shares what").add_argument
    add("--dp", type=int, default=0, help="data-parallel replicas (default: the ranks left over)")
    add("--tp", type=int, default=1, help="ranks that share each layer")
    add("--pp", type=int, default=1, help="pipeline stages")
    add("--dp-kind", choices=("ddp", "fsdp"), default="ddp")
    add("--schedule", choices=("1f1b", "gpipe", "interleaved"), default="1f1b")
    add = parser.add_argument_group("model and data").add_argument
    for name, default in (("layers", 4), ("dim", 64), ("heads", 4), ("seq", 64), ("batch", 8)):
        add(f"--{name}", type=int, default=default)
    add("--microbatches", type=int, default=0, help="per batch (default: 4 with a pipeline, else 1)")
    add("--accumulate", type=int, default=1, help="batches per optimizer step")
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("run").add_argument
    add("--device", choices=("cpu", "cuda"), default=device)
    add("--steps", type=int, default=100)
    add("--eval-every", type=int, default=0, metavar="N", help="evaluate after every N steps")
    add("--eval-batches", type=int, default=2)
    add("--checkpoint-every", type=int, default=0, metavar="N", help="after every N steps")
    add("--checkpoint-format", choices=("torch", "dcp"), default="torch")
    add("--checkpoint-dir", type=Path, help="kept; without it a folder that is removed at the end")
    add("--checkpoint-seconds", type=float, default=0.0, help="emulates a storage that slow")
    add("--first-step-seconds", type=float, default=0.0, help="emulates a long compile")
    text = "emulated accelerator: a layer takes MS milliseconds forward and twice that backward"
    add("--emulate-compute-ms", type=float, default=0.0, metavar="MS", help=text)
    text = (
        'inject a fault (needs keepstep), e.g. "slow rank 2 by 2x at step 30 for 15 steps"; may be repeated'
    )
    add("--fault", metavar="SENTENCE", action="append", default=[], help=text)
    text = (
        "JSON lines of this script's own step times and losses; rank 0's, or every rank's if FILE has {rank}"
    )
    add("--step-times", metavar="FILE", help=text)
    chosen = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    chosen.dp = chosen.dp or max(1, world // (chosen.tp * chosen.pp))
    chosen.microbatches = chosen.microbatches or (4 if chosen.pp > 1 else 1)
    check(parser, chosen, world)
    return chosen


def check(parser: argparse.ArgumentParser, chosen: argparse.Namespace, world: int) -> None:
    """Refuse sizes that do not fit, before anything is started."""
    stages = chosen.pp * (2 if chosen.schedule == "interleaved" and chosen.pp > 1 else 1)
    if chosen.dp * chosen.tp * chosen.pp != world:
        parser.error(f"--dp {chosen.dp} x --tp {chosen.tp} x --pp {chosen.pp} is not the world size {world}")
    if chosen.batch % chosen.microbatches:
        parser.error(f"--batch {chosen.batch} cannot be cut into {chosen.microbatches} equal micro-batches")
    if chosen.layers < stages:
        parser.error(f"--layers {chosen.layers} are fewer than the {stages} pipeline stages")
    if chosen.dim % chosen.heads or chosen.heads % chosen.tp:
        parser.error("--dim must be a multiple of --heads, and --heads of --tp")


def faults_of(sentence: str, rank: int) -> Faults:
    """What to inject on this rank; only here, and only when asked, does the example know keepstep."""
    if not sentence:
        return NoFaults()
    from keepstep.faults import Injector, parse

    return Injector(parse(sentence), rank=rank)


@dataclass
class Job:
    """What the training loop works on."""

    model: Whole | Piped
    optimizer: torch.optim.Optimizer
    train: Iterator[tuple[Tensor, Tensor]]
    held_out: Iterator[tuple[Tensor, Tensor]]
    checkpoints: Checkpoints
    faults: Faults
    modules: list[torch.nn.Module]
    device: torch.device


def build(chosen: argparse.Namespace, rank: int, device: torch.device) -> Job:
    sizes = Sizes(
        chosen.dp, chosen.tp, chosen.pp, chosen.dp_kind, chosen.schedule, chosen.microbatches, chosen.batch
    )
    shape = Shape(chosen.layers, chosen.dim, chosen.heads, chosen.seq, VOCABULARY)
    faults = faults_of("\n".join(chosen.fault), rank)
    compute = Compute(chosen.emulate_compute_ms / 1e3, faults, overlap_host=chosen.tp == 1, device=device)
    mesh = make_mesh(sizes, device.type)
    stages = build_stages(shape, sizes, mesh, compute, device, chosen.seed)
    modules = [module for _, module in stages]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    model = (
        Piped(stages, shape, sizes, mesh, device) if chosen.pp > 1 else Whole(modules[0], chosen.microbatches)
    )
    replica = mesh.get_local_rank("dp")
    optimizer = torch.optim.AdamW(parameters, lr=chosen.lr)
    optimizer.register_step_pre_hook(lambda *_: faults.at("optimizer"))

    def fetching() -> None:
        faults.at("data")
        faults.fetch()

    text = standard_library_text()
    edge = len(text) * 9 // 10
    return Job(
        model=model,
        optimizer=optimizer,
        train=batches(text[:edge], chosen.batch, chosen.seq, chosen.seed * 1000 + replica, fetching),
        held_out=batches(text[edge:], chosen.batch, chosen.seq, 10**9 + replica),
        checkpoints=Checkpoints(
            chosen.checkpoint_dir, chosen.checkpoint_format, chosen.checkpoint_seconds, rank
        ),
        faults=faults,
        modules=modules,
        device=device,
    )


def train_step(job: Job, accumulate: int) -> Tensor | None:
    """One optimizer step over ``accumulate`` batches; the mean loss where it is known (the last stage)."""
    job.optimizer.zero_grad(set_to_none=True)
    losses: list[Tensor] = []
    for number in range(accumulate):
        inputs, targets = (part.to(job.device) for part in next(job.train))
        loss = job.model.forward_backward(inputs, targets, last=number == accumulate - 1)
        if loss is not None:
            losses.append(loss)
    if accumulate > 1:
        for group in job.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= accumulate
    job.optimizer.step()
    return torch.stack(losses).mean() if losses else None


def world_mean(value: Tensor | None, job: Job) -> float:
    """Mean over the ranks that know the value; the same on all ranks."""
    pair = torch.tensor([0.0, 0.0] if value is None else [float(value), 1.0], device=job.device)
    if not job.faults.skips():
        dist.all_reduce(pair)
    return float(pair[0] / pair[1])


@torch.no_grad()
def evaluate(job: Job, count: int) -> float:
    for module in job.modules:
        module.eval()
    losses: list[Tensor] = []
    for _ in range(count):
        inputs, targets = (part.to(job.device) for part in next(job.held_out))
        loss = job.model.evaluate(inputs, targets)
        if loss is not None:
            losses.append(loss)
    mean = world_mean(torch.stack(losses).mean() if losses else None, job)
    for module in job.modules:
        module.train()
    return mean


def train(job: Job, chosen: argparse.Namespace, rank: int, times: TextIO | None) -> None:
    for step in range(chosen.steps):
        job.faults.begin_step(step)
        began = time.perf_counter()
        if step == 0 and chosen.first_step_seconds:
            time.sleep(chosen.first_step_seconds)
        loss = train_step(job, chosen.accumulate)
        shown = world_mean(loss, job) if step % 10 == 9 or step == chosen.steps - 1 else None
        seconds = time.perf_counter() - began
        if times is not None:
            known = None if loss is None else float(loss)
            times.write(json.dumps({"step": step, "seconds": round(seconds, 6), "loss": known}) + "\n")
            times.flush()
        if rank == 0 and shown is not None:
            print(f"step {step + 1:5d}  loss {shown:.4f}  {seconds:.3f} s", flush=True)
        if chosen.eval_every and (step + 1) % chosen.eval_every == 0:
            held_out = evaluate(job, chosen.eval_batches)
            if rank == 0:
                print(f"step {step + 1:5d}  held-out loss {held_out:.4f}", flush=True)
        if chosen.checkpoint_every and (step + 1) % chosen.checkpoint_every == 0:
            job.checkpoints.save(step, job.modules, job.optimizer)


def describe(chosen: argparse.Namespace, world: int, backend: str) -> str:
    emulated = chosen.emulate_compute_ms
    cost = (
        f"compute emulated ({emulated:g} ms a layer forward, twice that backward)"
        if emulated
        else "real compute"
    )
    pipeline = f" ({chosen.schedule}, {chosen.microbatches} micro-batches)" if chosen.pp > 1 else ""
    return (
        f"gpt: {world} ranks = pp {chosen.pp}{pipeline} x dp {chosen.dp} ({chosen.dp_kind}) x tp {chosen.tp}, "
        f"{backend} on {chosen.device}, {chosen.layers} layers of {chosen.dim}, {cost if emulated else 'real compute'}"
    )


def main() -> None:
    chosen = arguments()
    torch.set_num_threads(1)
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    if chosen.device == "cuda":
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "nccl" if chosen.device == "cuda" else "gloo"
    dist.init_process_group(backend)
    if rank == 0:
        print(describe(chosen, dist.get_world_size(), backend), flush=True)
    job = build(chosen, rank, device)
    name = chosen.step_times
    if name and (rank == 0 or "{rank}" in name):
        with open(name.replace("{rank}", str(rank)), "w") as times:
            train(job, chosen, rank, times)
    else:
        train(job, chosen, rank, None)
    job.checkpoints.remove()
    dist.barrier()  # nobody closes connections that a peer still uses
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
