"""This node's share of a run: what all parts of its launcher work with, and what they tell the operator."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from keepstep.core.log_lines import one_line
from keepstep.launch.command import run_folder
from keepstep.launch.command.job import Job
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import Place
from keepstep.launch.workers.processes import Processes


class LocalRun:
    """The job, its run folder, the file with its secret, and the launcher's children."""

    def __init__(self, job: Job, folder: Path, secret: Path, processes: Processes) -> None:
        self.job, self.folder, self.secret, self.processes = job, folder, secret, processes
        self._started_unix_s = time.time()

    def warn(self, text: str) -> None:
        """Print a line on stderr, also with ``--quiet``."""
        print(f"keepstep: {one_line(text)}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line on stderr, but not with ``--quiet``."""
        if not self.job.quiet:
            self.warn(text)

    def note(self, text: str) -> None:
        """Print a line on stderr, but only with ``--verbose``."""
        if self.job.verbose:
            self.say(text)

    def describe(
        self, place: Place | None, controller: Endpoint | None, term: int, rings: Mapping[int, str]
    ) -> None:
        """Write ``run.json``, by which others find the run.

        Args:
            place: this node's.
            controller: where it can be met.
            term: of the controller, where it may move to another node; else 0.
            rings: paths by rank.
        """
        told = run_folder.description(
            self.job, self.folder, place, self._started_unix_s, controller, self.secret
        )
        told |= {"term": term} if term else {}
        self._write("run.json", {**told, "rings": {str(rank): path for rank, path in rings.items()}})

    def ended(self, exit_code: int, reason: str) -> None:
        """Write ``end.json``: how the run ended."""
        self._write("end.json", {"exit_code": exit_code, "reason": reason, "ended_unix_s": time.time()})

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        try:
            run_folder.write_json(self.folder / name, content)
        except OSError as error:
            self.warn(f"{self.folder / name}: cannot be written: {error.strerror}")
