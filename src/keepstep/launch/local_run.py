"""What a launcher says to the operator, and what it writes into the run's folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.core.log_lines import one_line
from keepstep.launch.command import run_folder
from keepstep.launch.command.job import Job
from keepstep.launch.command.placement import Place

if TYPE_CHECKING:
    from keepstep.launch.controller.hosting import Hosting


class Words:
    """Lines on stderr, and the files ``run.json`` and ``end.json``."""

    def __init__(self, job: Job, folder: Path, secret: Path) -> None:
        self._job, self._folder, self._secret = job, folder, secret
        self._started_unix_s = time.time()

    def warn(self, text: str) -> None:
        """Also with ``--quiet``."""
        print(f"keepstep: {one_line(text)}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Not with ``--quiet``."""
        if not self._job.quiet:
            self.warn(text)

    def note(self, text: str) -> None:
        """With ``--verbose`` alone."""
        if self._job.verbose:
            self.say(text)

    def describe(self, place: Place | None, controller: Hosting, rings: Mapping[int, str]) -> None:
        """What others find the run by; the node that hosts the controller writes it. ``rings``: paths by rank."""
        if not controller.is_here:
            return
        told = run_folder.description(
            self._job, self._folder, place, self._started_unix_s, controller.at, self._secret
        )
        self._write(
            "run.json",
            {
                **told,
                **({"term": controller.term} if controller.seat else {}),
                "rings": {str(rank): path for rank, path in rings.items()},
            },
        )

    def ended(self, exit_code: int, reason: str) -> None:
        """How the run ended."""
        self._write("end.json", {"exit_code": exit_code, "reason": reason, "ended_unix_s": time.time()})

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        try:
            run_folder.write_json(self._folder / name, content)
        except OSError as error:
            self.warn(f"{self._folder / name}: cannot be written: {error.strerror}")
