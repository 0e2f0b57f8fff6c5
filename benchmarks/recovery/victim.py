"""What all jobs of the recovery bench share: their size, and how a rank fails when a file in the folder says so.

``RECOVERY_RANKS`` and ``RECOVERY_BALLAST`` (bytes of state beside model and optimizer, a rank) are set by the bench.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch


def ranks() -> int:
    """Of the job."""
    return int(os.environ.get("RECOVERY_RANKS", "4"))


def ballast_bytes() -> int:
    """Of each rank's state."""
    return int(os.environ.get("RECOVERY_BALLAST", "0"))


class Ballast(torch.nn.Module):
    """A state of so many bytes that no step uses; a rank that comes back has to have it again all the same.

    As large models do it: memory without values first, which are restored, or made by `initialise` in a new training.
    """

    numbers: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.empty(max(1, ballast_bytes() // 4)))

    def initialise(self) -> None:
        """Give it values, not all the same."""
        self.numbers[: len(self.numbers) // 2] = 1
        self.numbers[len(self.numbers) // 2 :] = 2


def misbehave(folder: Path, rank: int) -> None:
    """Do what a file for this rank says, once.

    Raises:
        RuntimeError: the file is ``exception-RANK``; with ``sleep-RANK`` it does not come back.
    """
    for name in ("exception", "sleep"):
        order = folder / f"{name}-{rank}"
        if order.exists():
            order.unlink()
            if name == "exception":
                raise RuntimeError("the bench told this rank to fail")
            time.sleep(3600)
