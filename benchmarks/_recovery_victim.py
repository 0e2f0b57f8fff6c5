"""What all jobs of the recovery bench share: their size, and how a rank fails when a file in the folder says so.

``RECOVERY_RANKS`` and ``RECOVERY_BALLAST`` (bytes of state beside model and optimizer, a rank) are set by the bench.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def ranks() -> int:
    """Of the job."""
    return int(os.environ.get("RECOVERY_RANKS", "4"))


def ballast_bytes() -> int:
    """Of each rank's state."""
    return int(os.environ.get("RECOVERY_BALLAST", "0"))


class Ballast:
    """A state of so many bytes that no step uses; a rank that comes back has to have it again all the same."""

    def __init__(self) -> None:
        import torch

        self._numbers = torch.zeros(max(1, ballast_bytes() // 4))

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self._numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._numbers.copy_(state["numbers"])


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
