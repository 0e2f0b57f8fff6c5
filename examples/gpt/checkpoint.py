"""Checkpoints by ``torch.save`` (a file per rank) or DCP, on an emulated slow storage if asked."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp


class SlowFile(io.BufferedWriter):
    """A file whose first write takes ``seconds``: an emulated slow storage."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._seconds = seconds

    def write(self, data: Any, /) -> int:
        time.sleep(self._seconds)
        self._seconds = 0.0
        return super().write(data)


class SlowWriter(dcp.FileSystemWriter):
    """DCP's file writer on an emulated slow storage."""

    def __init__(self, path: Path, seconds: float) -> None:
        super().__init__(path)
        self._seconds = seconds

    def write_data(self, plan: Any, planner: Any) -> Any:
        time.sleep(self._seconds)
        return super().write_data(plan, planner)


class Checkpoints:
    """Keeps the newest checkpoint of a run."""

    def __init__(self, folder: Path | None, kind: str, seconds: float, rank: int) -> None:
        self._temporary = folder is None
        run = os.environ.get("TORCHELASTIC_RUN_ID", "alone") + "-" + os.environ.get("MASTER_PORT", "0")
        self.folder = folder or Path(tempfile.gettempdir()) / f"gpt-checkpoints-{run}"
        self.kind, self.seconds, self.rank = kind, seconds, rank

    def save(self, step: int, modules: list[torch.nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        model = [module.state_dict() for module in modules]
        state = {"step": step, "model": model, "optimizer": optimizer.state_dict()}
        if self.kind == "dcp":
            # every rank's shards under its own name: what a restart with the same layout needs
            folder = self.folder / f"step-{step}"
            dcp.save({f"rank{self.rank}": state}, storage_writer=SlowWriter(folder, self.seconds))
            if self.rank == 0:
                for older in set(self.folder.glob("step-*")) - {folder}:
                    shutil.rmtree(older, ignore_errors=True)
            return
        partial = self.folder / f"rank{self.rank}.partial"
        with SlowFile(partial, self.seconds) as file:
            torch.save(state, file)
        partial.replace(self.folder / f"rank{self.rank}.pt")

    def remove(self) -> None:
        """Remove what this rank saved, unless a folder was asked for."""
        if not self._temporary or not self.folder.exists():
            return
        if self.kind == "dcp" and self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / f"rank{self.rank}.pt").unlink(missing_ok=True)
        with suppress(OSError):  # the last rank finds it empty
            self.folder.rmdir()
