"""A healthy training as its users write it, with all that it prints: ``job.py FRAMEWORK SEED``.

It ends well; the seed draws its length, the sizes, and whether it evaluates and saves.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it at its import
os.environ.setdefault("DS_BUILD_OPS", "0")

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

framework, seed = sys.argv[1], int(sys.argv[2])
draw = random.Random(seed)
steps, width, batch = draw.randint(20, 80), draw.choice((32, 64, 128)), draw.choice((4, 8))
evaluates, saves = draw.random() < 0.5, draw.random() < 0.5
folder = Path(tempfile.gettempdir()) / f"why-healthy-{os.getppid()}"


class Samples(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(width), "labels": torch.tensor(1.0)}


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))


def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(batch, width)).square().mean()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"rank {dist.get_rank()} step {step} loss {loss.item():.4f}", flush=True)
    if saves and dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save({"step": steps}, folder / "state.pt")
    dist.destroy_process_group()


def ddp() -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(net())
    loop(model, torch.optim.AdamW(model.parameters()))


def fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = net()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    loop(model, torch.optim.AdamW(model.parameters()))


def deepspeed() -> None:
    import deepspeed as ds  # pyright: ignore[reportMissingImports]

    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it is compiled at first use, a minute each
    ds.init_distributed(dist_backend="gloo")
    model: Any = net()
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": draw.randint(0, 3)},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "steps_per_print": 10,
    }
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    engine, _, _, _ = ds.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(steps):
        engine.backward(engine(torch.randn(batch, width, dtype=torch.bfloat16)).float().mean())
        engine.step()
    dist.destroy_process_group()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def transformers() -> None:
    from transformers import Trainer, TrainingArguments  # pyright: ignore[reportMissingImports]

    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch,
        use_cpu=True,
        report_to=[],
        logging_steps=5,
        save_strategy="steps" if saves else "no",
        save_steps=15,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=10,
    )
    data = torch.utils.data.Subset(Samples(), range(256))
    Trainer(Model(), arguments, train_dataset=Samples(), eval_dataset=data).train()


def lightning() -> None:
    from lightning.pytorch import LightningModule, Trainer  # pyright: ignore[reportMissingImports]

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            loss = (self.net(batch["x"]).squeeze(-1) - batch["labels"]).square().mean()
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            self.log("val_loss", self.net(batch["x"]).mean(), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    data = DataLoader(Samples(), batch_size=batch)
    few = DataLoader(torch.utils.data.Subset(Samples(), range(64)), batch_size=batch)
    Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        val_check_interval=10 if evaluates else None,
        limit_val_batches=4 if evaluates else 0,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=saves,
    ).fit(Module(), data, few if evaluates else None)


JOBS: dict[str, Callable[[], None]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "transformers": transformers,
    "lightning": lightning,
}
JOBS[framework]()
