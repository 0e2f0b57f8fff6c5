"""Shares in DeepSpeed: its own engine in real processes (on the CPU), against training on one rank."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.session.test_shares import Job

from keepstep.integrations.deepspeed_microbatches import microbatches

COUNT = 12
TRAIN = """
import json, os, sys
os.environ["LOCAL_RANK"] = os.environ["RANK"]
told = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # DeepSpeed writes its log there
import deepspeed
import torch, torch.distributed as dist
import keepstep
from keepstep.integrations.deepspeed_microbatches import microbatches

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
world = int(os.environ["WORLD_SIZE"])
store = dist.FileStore(sys.argv[1], world)
dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=world)
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
session = keepstep.Session()
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={
    "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 12 // world,
    "zero_optimization": {"stage": int(os.environ["STAGE"])}, "zero_allow_untested_optimizer": True,
    "steps_per_print": 1 << 30,
})
session.restore(model=model)
for step in session.steps(0, 1 << 30):
    stop = torch.tensor([float(session.rank == 0 and sys.stdin.readline() == "end\\n")])
    dist.broadcast(stop, 0)
    if stop:
        session._shares.finish()
        break
    own = []
    for number in microbatches(session, engine):
        own.append(number)
        data = torch.arange(24.0).reshape(3, 8).sin() + number / 12
        engine.backward((engine(data) - data.cos()).square().mean())
        engine.step()
    assert engine.global_steps == step + 1
    everybody = [None] * world
    dist.all_gather_object(everybody, own)
    if session.rank == 0:
        print(json.dumps([everybody, [one.tolist() for one in model.parameters()]]), file=told, flush=True)
dist.destroy_process_group()
"""


def flat(found: Any) -> list[float]:
    return [value for one in found for value in flat(one)] if isinstance(found, list) else [found]


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: DS_BUILD_OPS=0 pip install 'keepstep[deepspeed]'",
)
@pytest.mark.parametrize("stage", ["0", "1"])
def test_unequal_shares_give_the_same_model(tmp_path: Path, stage: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.arange(24.0).reshape(3, 8).sin()
    data = torch.stack([rows + number / COUNT for number in range(COUNT)])
    job = Job(str(tmp_path), 2, TRAIN, STAGE=stage)
    shares: list[list[int]] = []
    try:
        for step in range(6):
            if step in (1, 3):
                job.order(step, {1: [10, 2], 3: [4, 8]}[step])
            shares, found = job.step()
            assert sorted(shares[0] + shares[1]) == list(range(COUNT))
            (model(data) - data.cos()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert flat(found) == pytest.approx(
                flat([one.tolist() for one in model.parameters()]), rel=1e-5, abs=1e-6
            )
        assert [len(one) for one in shares] == [4, 8]
        assert job.end() == [0, 0]
    finally:
        job.close()


def engine(stage: int = 0, *, managed: bool = True, **more: Any) -> Any:
    return SimpleNamespace(
        zero_optimization_stage=lambda: stage, managed_gradient_accumulation=lambda: managed, **more
    )


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (engine(2), "ZeRO stage 2 reduces gradients in each of them"),
        (engine(3), "ZeRO stage 3 reduces gradients in each of them"),
        (engine(train_batch=None), "a PipelineEngine runs as many as it was configured with"),
        (engine(managed=False), "managed_gradient_accumulation is off"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(refused: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        next(microbatches(None, refused))  # type: ignore[arg-type]
