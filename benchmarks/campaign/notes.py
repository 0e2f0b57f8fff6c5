"""What the jobs of a campaign write beside the run's folder: for the scorer alone, after the verdict."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any


class Notes:
    """Of one rank. Its command line names the seed and the folder, and says nothing of what will happen."""

    def __init__(self) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--seed", type=int, required=True)
        parser.add_argument("--case", default="", help="where a job serves several")
        parser.add_argument("--notes", type=Path, required=True, help="FOLDER for them")
        parser.add_argument("--step-times", required=True, help="FILE with {rank}")
        given = parser.parse_args()
        self.seed: int = given.seed
        self.case: str = given.case
        self.rank = int(os.environ["RANK"])
        self.first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        self.folder: Path = given.notes
        self._times = Path(given.step_times.replace("{rank}", str(self.rank)))
        self._last_s = time.monotonic()

    def began(self) -> None:
        """The rank's process has begun."""
        self._add(f"lives-{self.rank}", f"began {os.getpid()}")

    def done(self) -> None:
        """It has come to its end."""
        self._add(f"lives-{self.rank}", f"done {os.getpid()}")

    def step(self, step: int) -> None:
        """A step is over."""
        now_s = time.monotonic()
        line = json.dumps({"step": step, "seconds": now_s - self._last_s})
        self._last_s = now_s
        with self._times.open("a") as file:
            file.write(f"{line}\n")

    def truth(self, **told: Any) -> None:
        """This rank is to blame from now on."""
        told = {"rank": self.rank, "unix_s": time.time(), **told}
        self._add(f"truth-{self.rank}.jsonl", json.dumps(told))

    def _add(self, name: str, line: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(f"{line}\n")
            file.flush()
            os.fsync(file.fileno())
