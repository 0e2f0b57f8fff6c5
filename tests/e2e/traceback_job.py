"""Prints the traceback of an error in each place where the probe replaces a function of torch."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 100:
            raise ValueError("on purpose")
        return self.layer(x)


class Data(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise IndexError("on purpose")


class Unsaved:
    def __reduce__(self) -> Any:
        raise RuntimeError("on purpose")


def in_backward() -> None:
    def hook(_: torch.Tensor) -> None:
        raise ValueError("on purpose")

    said = model(torch.ones(2, 4)).sum()
    said.register_hook(hook)
    said.backward()


dist.init_process_group("gloo")
model = DistributedDataParallel(Model())
places: dict[str, Callable[[], object]] = {
    "forward": lambda: model(torch.full((2, 4), 1000.0)),
    "backward": in_backward,
    "sizes": lambda: dist.all_gather([torch.zeros(3)], torch.zeros(2)),
    "data": lambda: next(iter(DataLoader(Data()))),
    "saving": lambda: torch.save(Unsaved(), Path("/dev/null")),
}
for name, place in places.items():
    try:
        place()
    except Exception:  # noqa: PERF203
        print(f"in {name}\n{traceback.format_exc()}", flush=True)
dist.destroy_process_group()
