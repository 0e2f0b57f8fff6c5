"""A real text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

VOCABULARY = 256  # a byte is a token


def standard_library_text(limit_bytes: int = 4 << 20) -> Tensor:
    """The first ``limit_bytes`` bytes of the library's modules in the order of their names; uint8."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if path.is_file():  # distributions link to files that may be missing
            text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no .py files in {sysconfig.get_path('stdlib')}: this Python has no sources")
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


class Windows(IterableDataset[tuple[Tensor, Tensor]]):
    """Endless batches of random windows: (inputs, targets), each of shape (batch, sequence).

    All ranks of one data-parallel replica are given the same ``stream`` and therefore see the same batches.
    """

    def __init__(
        self, text: Tensor, batch: int, sequence: int, stream: int, on_fetch: Callable[[], None] | None = None
    ) -> None:
        self.text, self.batch, self.sequence, self.stream = text, batch, sequence, stream
        self.on_fetch = on_fetch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.stream)
        positions = torch.arange(self.sequence + 1)
        while True:
            if self.on_fetch is not None:
                self.on_fetch()
            starts = torch.randint(len(self.text) - self.sequence - 1, (self.batch, 1), generator=generator)
            window = self.text[starts + positions].long()
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def batches(
    text: Tensor, batch: int, sequence: int, stream: int, on_fetch: Callable[[], None] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """An iterator over :class:`Windows` through a DataLoader, as training scripts have it."""
    return iter(DataLoader(Windows(text, batch, sequence, stream, on_fetch), batch_size=None))
