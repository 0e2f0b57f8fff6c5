"""`odd_job.py` with Lightning: one rank goes its way in a callback."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from benchmarks.campaign.notes import Notes
from benchmarks.campaign.odd_draw import draw
from benchmarks.campaign.odd_ways import go_the_way
from lightning.pytorch import Callback, LightningModule, Trainer  # pyright: ignore[reportMissingImports]
from lightning.pytorch.strategies import DDPStrategy  # pyright: ignore[reportMissingImports]
from torch.utils.data import DataLoader, TensorDataset

notes = Notes()
odd = draw(notes.seed)
notes.began()


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(64, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        time.sleep(0.05)
        return self.net(batch[0]).mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", self.net(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


class GoesItsWay(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        step = trainer.global_step - 1
        notes.step(step)
        if step == odd.step and notes.rank == odd.rank:
            go_the_way(odd, module.net)


def loader(batches: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(4 * odd.nproc * batches, 64)), batch_size=4)


Trainer(
    max_steps=odd.steps,
    accelerator="cpu",
    devices=odd.nproc,
    strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(minutes=30)),
    callbacks=[GoesItsWay()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
).fit(Model(), loader(30), loader(4))
notes.done()
