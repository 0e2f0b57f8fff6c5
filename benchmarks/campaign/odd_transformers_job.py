"""`odd_job.py` with the Trainer of transformers: one rank goes its way in a callback."""

from __future__ import annotations

import time
from typing import Any

import torch
from benchmarks.campaign.notes import Notes
from benchmarks.campaign.odd_draw import draw
from benchmarks.campaign.odd_ways import go_the_way
from transformers import Trainer, TrainerCallback, TrainingArguments  # pyright: ignore[reportMissingImports]

notes = Notes()
odd = draw(notes.seed)
notes.began()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        time.sleep(0.05)
        y = self.net(x).squeeze(-1)
        loss = y.mean() if labels is None else (y - labels).square().mean()
        return {"loss": loss, "logits": y}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(64), "labels": torch.tensor(1.0)}


class GoesItsWay(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        notes.step(state.global_step - 1)
        if state.global_step - 1 == odd.step and notes.rank == odd.rank:
            go_the_way(odd, model.net)
        return control


model = Model()
arguments = TrainingArguments(
    str(notes.folder / "trainer"),
    max_steps=odd.steps,
    per_device_train_batch_size=4,
    use_cpu=True,
    report_to=[],
    save_strategy="steps",
    save_steps=30,
    eval_strategy="steps",
    eval_steps=25,
    logging_steps=10,
    disable_tqdm=True,
    ddp_timeout=1800,
)
Trainer(
    model, arguments, train_dataset=Samples(4000), eval_dataset=Samples(64), callbacks=[GoesItsWay()]
).train()
notes.done()
