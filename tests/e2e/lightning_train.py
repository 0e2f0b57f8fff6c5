"""A Lightning training with `Recovery` that writes what it trained on; rank 1 kills itself in incarnation 0.

Arguments: folder, strategy. ``DIE``: "BATCH WHERE", batches counted over epochs. ``LOADER``: "plain", "stateful",
"stream". ``KEEP``: "no" leaves the callback out. ``AVERAGE``: the weights are averaged.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything  # pyright: ignore[reportMissingImports]
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging  # pyright: ignore[reportMissingImports]
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # pyright: ignore[reportMissingImports]
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchmetrics import MeanMetric  # pyright: ignore[reportMissingImports]

from keepstep.integrations.lightning import Recovery

folder, strategy = Path(sys.argv[1]), sys.argv[2]
dies_at, where = (os.environ.get("DIE") or "-1 nowhere").split(" ", 1)
kind = os.environ.get("LOADER", "plain")
incarnation = int(os.environ.get("KEEPSTEP_INCARNATION", "0"))
rank = int(os.environ["RANK"])


def die(batch: int, here: str) -> None:
    if (batch, here, rank, incarnation) == (int(dies_at), where, 1, 0):
        os.kill(os.getpid(), signal.SIGKILL)


def sample(index: int) -> tuple[torch.Tensor, int]:
    """With noise from the process's or the worker's random state."""
    x = torch.linspace(-1, 1, 16).add(index).cos() + 0.01 * torch.randn(16)
    return x, index


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return sample(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(rank, 40, 2):
            yield sample(index)


class Counting:
    """Batches in an order of its own, and where in them we are."""

    def __init__(self) -> None:
        self.generator, self.at = torch.Generator().manual_seed(rank), 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        self.at %= len(self)
        while self.at < len(self):
            self.at += 1
            picked = torch.randint(1000, (4,), generator=self.generator).tolist()
            rows = [sample(index) for index in picked]
            yield torch.stack([row[0] for row in rows]), torch.tensor([row[1] for row in rows])

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.at = state["at"]


def loader() -> Any:
    if kind == "stateful":
        return Counting()
    if kind == "stream":
        return DataLoader(Stream(), batch_size=4)
    workers = int(os.environ.get("WORKERS", "0"))
    samples = Samples()
    if strategy == "ddp":
        sampler = DistributedSampler(samples, 2, rank, seed=3)
        return DataLoader(samples, batch_size=4, num_workers=workers, sampler=sampler)
    # Shuffled by the process's random state, as no sampler is given for the ranks.
    return DataLoader(samples, batch_size=4, num_workers=workers, shuffle=True)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
        self.mean, self.batches = MeanMetric(), 0

    def configure_model(self) -> None:
        if strategy == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            mesh: Any = self.device_mesh  # Any: there is one with this strategy
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self.batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batches = checkpoint["batches"]

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, index = batch
        loss = (self.net(x) - index.unsqueeze(1) / 40).square().mean()
        die(self.batches, "forward")
        self.log("seen", loss, on_step=False, on_epoch=True)
        self.mean(loss.detach())
        seen = float(loss.item()).hex()
        self._write(f"{self.batches} {self.current_epoch} {self.global_step} {index.tolist()} {seen}")
        self.batches += 1
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        die(self.batches - 1, "after step")

    def validation_step(self, batch: Any, _: int) -> None:
        x, index = batch
        self.log("val_loss", (self.net(x) - index.unsqueeze(1) / 40).square().mean(), sync_dist=True)

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            die(self.batches - 1, "after validation")

    def on_train_epoch_end(self) -> None:
        die(self.batches - 1, "epoch end")
        optimizer: Any = self.optimizers()  # Any: there is one, so that it is no list
        seen = float(self.trainer.callback_metrics["seen"].item()).hex()
        mean, rate = float(self.mean.compute().item()).hex(), optimizer.param_groups[0]["lr"].hex()
        self._write(f"epoch {self.current_epoch} {seen} {mean} {rate}")
        self.mean.reset()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}

    def _write(self, line: str) -> None:
        with (folder / f"lines-{rank}").open("a") as file:
            file.write(line + "\n")


seed_everything(5, workers=True, verbose=False)
trainer = Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy={"ddp": DDPStrategy, "fsdp2": lambda: ModelParallelStrategy(2, 1), "one": lambda: "auto"}[
        strategy
    ](),
    callbacks=[
        EarlyStopping("val_loss", patience=50),
        *([EMAWeightAveraging(decay=0.5)] if "AVERAGE" in os.environ else []),
        *([] if os.environ.get("KEEP") == "no" else [Recovery()]),
    ],
    accumulate_grad_batches=int(os.environ.get("ACCUMULATE", "1")),
    max_epochs=3,
    check_val_every_n_epoch=1,
    use_distributed_sampler=False,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model, loader(), DataLoader(Samples(), batch_size=20))
ends = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
with (folder / f"lines-{rank}").open("a") as log:
    log.write(f"end {float(sum(p.double().square().sum().item() for p in ends)).hex()}\n")
if dist.is_initialized():
    dist.destroy_process_group()
