"""How a rank of the recovery bench fails when a file in its folder says so."""

from __future__ import annotations

import time
from pathlib import Path


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
