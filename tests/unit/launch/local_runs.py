"""A launcher's surroundings for the tests of its parts: real children and a real guard, lines kept in a list."""

from __future__ import annotations

from pathlib import Path

from keepstep.launch.command.job import Job, job_from_command_line
from keepstep.launch.local_run import LocalRun
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.processes import Processes


class ToldRun(LocalRun):
    """Keeps in ``said`` what the operator would be told with ``--verbose``."""

    def __init__(self, folder: Path, job: Job | None = None, *, children: bool = True) -> None:
        """Without ``children`` none can be started, and no guard is forked."""
        none = object.__new__(Processes)
        processes = Processes(Guard("NO=such")) if children else none
        job = job or job_from_command_line(["--verbose", "train.py"], {})
        super().__init__(job, folder, folder / "secret", processes)
        self.said: list[str] = []

    def warn(self, text: str) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        self.warn(text)
