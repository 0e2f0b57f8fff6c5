"""Runs a job on the stand-in GPU, under ``keepstep run`` or alone.

    done = run(TRAIN, ["--layout", "ddp"], folder, ranks=4, faults=[Fault("slow", rank=1, step=20, value=1.3)])
    done.exit_code, done.console, done.devices[1].marks

``make cuda`` builds the environment, ``.venv-cuda`` or what ``STAND_IN_VENV`` names.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from benchmarks.stand_in.build import OPERATORS, build
from benchmarks.stand_in.device import CONTROL_BYTES
from benchmarks.stand_in.faults import VARIABLE, Fault, to_text

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(os.environ.get("STAND_IN_VENV", ROOT / ".venv-cuda"))
TRAIN = Path(__file__).with_name("jobs") / "train.py"
PYTHON = VENV / "bin" / "python"


@dataclass(frozen=True, slots=True)
class DeviceLog:
    """What a rank's device wrote down."""

    marks: dict[int, int] = field(default_factory=dict)
    """Device time in nanoseconds by tag; the jobs here mark the end of each step."""
    lines: tuple[str, ...] = ()
    """All else."""

    def periods_ns(self) -> list[int]:
        """From mark to mark, in the order of their tags."""
        times = [self.marks[tag] for tag in sorted(self.marks)]
        return [after - before for before, after in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Done:
    """A job that is over."""

    exit_code: int | None
    """None: stopped when its time was over."""
    console: str
    devices: list[DeviceLog]
    folder: Path
    """Has ``run``, the run folder of keepstep, ``control`` and ``devices``."""
    wall_s: float


def environment(
    folder: Path,
    *,
    faults: Iterable[Fault] = (),
    clock: Literal["real", "virtual"] = "real",
    kernel_us: float | str = 100,
    values: bool = False,
    settings: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The variables with which a process is on the stand-in; all ranks of a job get the same.

    ``folder`` gets the job's ``control`` file and its devices' logs. ``kernel_us`` is a number or
    ``"gemm=300,optimizer=50"``; with ``values`` operators compute, in jobs that ask for it; ``settings`` has more, ``STAND_IN_...`` of docs/design/stand-in-gpu.md among them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    devices = folder / "devices"
    devices.mkdir(exist_ok=True)
    (folder / "control").write_bytes(bytes(CONTROL_BYTES))
    libraries, before = build(VENV), os.environ.get("LD_LIBRARY_PATH")
    return {
        **os.environ,
        "LD_LIBRARY_PATH": f"{libraries}:{before}" if before else str(libraries),
        "STAND_IN_VALUES": str(libraries / OPERATORS) if values else "",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "STAND_IN_CONTROL": str(folder / "control"),
        "STAND_IN_LOG": str(devices),
        "STAND_IN_CLOCK": clock,
        "STAND_IN_KERNEL_US": str(kernel_us),
        VARIABLE: to_text(faults),
        **(settings or {}),
    }


def read_log(path: Path) -> DeviceLog:
    """Empty where the rank never used its device."""
    marks: dict[int, int] = {}
    lines: list[str] = []
    for line in path.read_text().splitlines() if path.exists() else ():
        word, _, rest = line.partition(" ")
        if word == "mark":
            tag, at = rest.split()
            marks[int(tag)] = int(at)
        else:
            lines.append(line)
    return DeviceLog(marks, tuple(lines))


def run(
    script: Path | str,
    arguments: Sequence[str],
    folder: Path,
    *,
    ranks: int,
    watched: bool = True,
    flags: Sequence[str] = (),
    timeout_s: float = 120,
    faults: Iterable[Fault] = (),
    clock: Literal["real", "virtual"] = "real",
    kernel_us: float | str = 100,
    values: bool = False,
    settings: Mapping[str, str] | None = None,
) -> Done:
    """Run ``script`` on ``ranks`` ranks and wait for its end, ``timeout_s`` at most; then everything is killed.

    With ``watched`` it runs under ``keepstep run`` with ``flags``, else its ranks are started as they are, and the
    exit code is that of the first to fail.
    """
    variables = environment(folder, faults=faults, clock=clock, kernel_us=kernel_us, values=values, settings=settings)
    began = time.monotonic()
    words = [str(script), *arguments]
    with open(folder / "console", "wb") as console:
        if watched:
            keepstep = [str(PYTHON), "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run"), *flags]
            started = [
                _start([*keepstep, "--nproc-per-node", str(ranks), *words], variables, console.fileno())
            ]
        else:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20000, 30000))}
            started = [
                _start(
                    [str(PYTHON), *words],
                    {
                        **variables,
                        **place,
                        "WORLD_SIZE": str(ranks),
                        "RANK": str(rank),
                        "LOCAL_RANK": str(rank),
                    },
                    console.fileno(),
                )
                for rank in range(ranks)
            ]
        codes = _wait(started, began + timeout_s)
    return Done(
        exit_code=None if None in codes else next((code for code in codes if code != 0), 0),
        console=(folder / "console").read_text(errors="replace"),
        devices=[read_log(folder / "devices" / f"rank-{rank}") for rank in range(ranks)],
        folder=folder,
        wall_s=round(time.monotonic() - began, 2),
    )


def _start(words: Sequence[str], variables: Mapping[str, str], console: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words, env=dict(variables), stdout=console, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
    )


def _wait(started: Sequence[subprocess.Popen[bytes]], until: float) -> list[int | None]:
    """Exit codes; a process that is over is reaped at once, since peers take a zombie for dead as well."""
    try:
        while time.monotonic() < until and None in [one.poll() for one in started]:
            time.sleep(0.02)
        return [one.poll() for one in started]
    finally:
        for one in started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
