"""Where the jobs of the bench run, and until when."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks._report import Line, Report
from benchmarks.gpu.judge import last_words

Kind = Literal["cuda", "stand-in", "cpu"]

JOB = Path(__file__).with_name("job.py")
ROOT = Path(__file__).parents[2]
_JOB_S, _END_S = 150.0, 40.0
_SLOWER = 4  # how much longer jobs may take that are not on a GPU
_NOT_A_GPU = {
    "cpu": "Gloo on the CPU: a try of the bench, not a figure",
    "stand-in": "a stand-in for the GPU: a try of the bench, not a figure of a GPU",
}


@dataclass(frozen=True, slots=True)
class Running:
    """A job under ``keepstep run``."""

    launcher: subprocess.Popen[bytes]
    folder: Path
    """Has ``run``, the run folder, and ``console.txt``."""

    def console(self) -> str:
        return (self.folder / "console.txt").read_text(errors="replace")

    def wait_for(self, condition: Callable[[], Any], what: str, until_s: float) -> Any:
        """What ``condition`` gives, once it is true. Raises RuntimeError when that does not come, or the job ends."""
        while not (found := condition()):
            if self.launcher.poll() is not None:
                raise RuntimeError(f"the job ended before {what}: {last_words(self.console())}")
            if time.monotonic() > until_s:
                raise RuntimeError(f"{what} did not come in time: {last_words(self.console())}")
            time.sleep(0.01)
        return found


class Bench:
    """Runs jobs and collects figures. A part has what is left of the time, but for the share of those after it."""

    def __init__(self, report: Report, folder: Path, *, device: Kind, quick: bool, seconds: float) -> None:
        self.report, self.device, self.quick = report, device, quick
        self.judged = device == "cuda"
        self._folder, self._jobs = folder, 0
        self._until_s = time.monotonic() + seconds
        self._later_s = 0.0

    def begin(self, later_s: float) -> None:
        """Begin a part, after which others have ``later_s``."""
        self._later_s = later_s

    def left_s(self) -> float:
        """Seconds that the part has left."""
        return self.until_s() - time.monotonic()

    def until_s(self) -> float:
        """When the part's time is over, as time.monotonic tells it."""
        return self._until_s - self._later_s

    def room(self, part: str) -> Path:
        """A folder for the jobs of a part. Raises RuntimeError where they have no GPU to run on."""
        if self.device == "cpu":
            raise RuntimeError("the jobs need a GPU, or the stand-in")
        folder = self._folder / part
        folder.mkdir()
        return folder

    @staticmethod
    def environment() -> dict[str, str]:
        """For jobs that import the bench."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Where there is no network, NCCL would look for one.
        interface = os.environ.get("NCCL_SOCKET_IFNAME", "lo")
        return {**os.environ, "NCCL_SOCKET_IFNAME": interface, "PYTHONPATH": path}

    @contextmanager
    def running(
        self,
        words: Sequence[str | Path],
        folder: Path,
        *,
        ranks: int = 1,
        flags: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> Iterator[Running]:
        """A job of ``words`` until the block's end; ``folder`` is made. ``settings``: more of its environment."""
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "keepstep.cli", "run", "--nproc-per-node", str(ranks)]
        command += ["--run-dir", str(folder / "run"), *flags, *map(str, words)]
        with (folder / "console.txt").open("wb") as log:
            launcher = subprocess.Popen(
                command, stdout=log, stderr=log, env={**self.environment(), **(settings or {})}
            )
        try:
            yield Running(launcher, folder)
        finally:
            end(launcher)

    def job(self, part: str, *, ranks: int = 1, watch: bool = True) -> list[dict[str, Any]]:
        """The result of each rank. Raises RuntimeError with the job's last words."""
        self._jobs += 1
        folder = self._folder / f"{self._jobs}-{part}"
        device, size = "cpu" if self.device == "cpu" else "cuda", "quick" if self.quick else "whole"
        words = [JOB, part, folder / "result", device, size]
        with self.running(words, folder, ranks=ranks, flags=() if watch else ("--no-watch",)) as job:
            patience_s = max(30.0, min(_JOB_S, self.left_s() + 30.0)) if self.judged else _SLOWER * _JOB_S
            try:
                code = job.launcher.wait(patience_s)
            except subprocess.TimeoutExpired:
                code = None
        if code != 0:
            why = "did not end in time" if code is None else f"ended with {code}"
            raise RuntimeError(f"the job {why}: {last_words(job.console())}")
        found = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(ranks)]
        with suppress(OSError):
            (node,) = json.loads((folder / "run" / "status.json").read_text())["nodes"]
            found[0]["dropped"] = node["dropped"]
        return found

    def add(self, name: str, value: float | str, unit: str, **more: Any) -> None:
        if not self.judged:
            more |= {"met": None, "limit": _NOT_A_GPU[self.device]}
            name = f"{self.device}: {name}"
        self.report.add(Line(name, value, unit, **more))


def end(launcher: subprocess.Popen[bytes]) -> None:
    """The launcher ends its workers, also when it is told to end."""
    launcher.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(_END_S)
    finally:
        launcher.kill()  # does nothing to one that has ended
        launcher.wait()
