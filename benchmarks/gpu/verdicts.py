"""Faults of the stand-in's jobs, played on a GPU by two ranks that share it: who is named, and after how long.

Slow ranks share the GPU by MPS, where it is there: without it they take turns on it, and each is slower by the other's
work. What hangs takes turns, since a kernel that never ends would hold up whoever shares MPS with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.stand_in.faults import VARIABLE, Fault, Phase, to_text
from benchmarks.stand_in.launch import TRAIN, read_log

from keepstep.core.events import Device, Kind
from keepstep.ring import RingReader

RANKS, ONSET, EARLY = 2, 60, 3
STEPS, STEPS_OF_HANG = 180, 80  # the host is some twenty steps ahead, and verdicts come once a second
SLOW_LAYER_US, STUCK_LAYER_US = 3000, 300  # who takes turns on the GPU is slow enough
PAUSE_S = 6.0
_PATIENCE_S = 75.0  # for a verdict on what hangs
_SETTLES_S = 6.0  # for a closer look at it
_TOGETHER = 4  # jobs


@dataclass(frozen=True, slots=True)
class Case:
    """One job. ``kinds`` of incidents are right; none: nothing is to be told."""

    name: str
    layout: str
    faults: tuple[Fault, ...] = ()
    kinds: tuple[str, ...] = ()
    steps: int = STEPS
    layer_us: int = SLOW_LAYER_US

    @property
    def rank(self) -> int | None:
        """The rank that is to be named."""
        return self.faults[0].rank if self.kinds else None


def slow(layout: str, factor: float, rank: int, onset: int = ONSET) -> Case:
    name = f"GPU ×{factor:g} from step {onset}, {layout}"
    return Case(name, layout, (Fault("slow", rank=rank, step=onset, value=factor),), ("slow",))


def stuck(name: str, fault: Fault, *kinds: str) -> Case:
    return Case(name, "ddp", (fault,), kinds, STEPS_OF_HANG, STUCK_LAYER_US)


def hung(where: Phase, rank: int) -> Case:
    return stuck(f"host hangs in {where}", Fault("hang", rank=rank, step=ONSET, where=where), "hang")


SLOW = (
    *(slow("ddp", 1.3, 1), slow("ddp", 4, 0), slow("fsdp2", 1.3, 0), slow("fsdp2", 2, 1)),
    *(slow("pipeline", 2, 1), slow("ddp", 2, 1, EARLY), slow("fsdp2", 2, 0, EARLY)),
    *(Case("healthy, ddp", "ddp"), Case("healthy, fsdp2", "fsdp2"), Case("healthy, pipeline", "pipeline")),
    Case("host slow by 60 ms, ddp", "ddp", (Fault("slow-host", rank=0, step=ONSET, value=0.06),), ("slow",)),
)
PAUSE = Fault("slow-host", rank=0, step=ONSET, until=ONSET + 1, where="checkpoint", value=PAUSE_S)
STUCK = (
    *(hung("data", 1), hung("forward", 0), hung("backward", 1), hung("optimizer", 0)),
    hung("checkpoint", 1),
    stuck("kernel never ends", Fault("never-ends", rank=1, step=ONSET), "hang"),
    stuck("a call is skipped", Fault("skip", rank=1, step=ONSET), "desync", "hang"),
    stuck("another call", Fault("order", rank=0, step=ONSET), "desync", "hang", "crash"),
    stuck(f"healthy, {PAUSE_S:g} s in a checkpoint", PAUSE),
    stuck("killed", Fault("die", rank=1, step=ONSET, where="backward"), "crash"),
    stuck("a kernel reads outside", Fault("illegal-address", rank=0, step=ONSET), "crash"),
)


@dataclass(frozen=True, slots=True)
class Told:
    """What was said of a case."""

    case: Case
    incidents: list[Mapping[str, Any]]
    error: float | None  # of an iteration's duration, at most, as a part of the device's own
    exit_code: int | None
    console: str

    @property
    def named(self) -> list[Mapping[str, Any]]:
        return [culprit for incident in self.incidents for culprit in incident["culprits"]]

    @property
    def first(self) -> Mapping[str, Any] | None:
        """The first incident of the kind that is right."""
        return next((one for one in self.incidents if one["kind"] in self.case.kinds), None)

    @property
    def is_right(self) -> bool:
        """The rank is named, alone or in a tie of both, in the first incident of its kind; nobody where all is well."""
        if not self.case.kinds:
            return not self.named
        first = self.first
        if first is None:
            return False
        ranks = [culprit["rank"] for culprit in first["culprits"]]
        tie = "desync" in self.case.kinds and sorted(ranks) == list(range(RANKS))
        return ranks == [self.case.rank] or tie

    @property
    def is_wrong_for_sure(self) -> bool:
        return any(one["confidence"] == "high" and one["rank"] != self.case.rank for one in self.named)

    def summary(self) -> dict[str, float | int | str]:
        said = [
            f"{incident['kind']}: "
            + (
                ", ".join(
                    f"rank {one['rank']} {one['cause']} ({one['confidence']})" for one in incident["culprits"]
                )
                or "nobody"
            )
            for incident in self.incidents
        ]
        found: dict[str, float | int | str] = {"told": "; ".join(said) or "nothing"}
        first = self.first
        if first is not None:
            if first["kind"] == "slow":
                found["iterations"] = first["detected_step"] - self.case.faults[0].step + 1
            elif first["kind"] in ("hang", "desync"):
                found["seconds"] = round(first["detected_unix_s"] - first["onset_unix_s"], 1)
        return found


def play(case: Case, folder: Path, environment: Mapping[str, str]) -> Told:
    """The job of a case, until it is over or has been told of."""
    folder.mkdir(parents=True)
    (folder / "devices").mkdir()
    more = {VARIABLE: to_text(case.faults), "STAND_IN_LOG": str(folder / "devices"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "keepstep.cli", "run", "--nproc-per-node", str(RANKS)]
    command += ["--run-dir", str(folder / "run"), str(TRAIN), "--real"]
    command += ["--layout", case.layout, "--steps", str(case.steps), "--layer-us", str(case.layer_us)]
    console = folder / "console.txt"
    with console.open("wb") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, env={**environment, **more})
        until = time.monotonic() + _PATIENCE_S
        try:
            while time.monotonic() < until and launcher.poll() is None:
                time.sleep(0.2)
                if "slow" not in case.kinds and any(
                    one["kind"] in ("hang", "desync") for one in incidents(folder)
                ):
                    until = min(until, time.monotonic() + _SETTLES_S)
                    if not case.kinds:
                        break
            code = launcher.poll()
        finally:
            found = incidents(folder)
            _end(launcher)
    found = incidents(folder) if code is not None else found  # those that an end brings are not the fault's
    return Told(case, found, worst_error(folder), code, console.read_text(errors="replace"))


def _end(launcher: subprocess.Popen[bytes]) -> None:
    launcher.terminate()
    try:
        launcher.wait(40)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def incidents(folder: Path) -> list[Mapping[str, Any]]:
    """In the order in which they were told; each is written whole."""
    return [json.loads(path.read_text()) for path in sorted((folder / "run" / "incidents").glob("*.json"))]


def worst_error(folder: Path) -> float | None:
    """Of the iterations that the shim measured, beside torch's own events; None: the job did not come to its end."""
    errors: list[float] = []
    for rank in range(RANKS):
        marks = read_log(folder / "devices" / f"rank-{rank}").marks
        for number, took_ns in measured(folder / "run" / "rings" / f"rank-{rank:05d}.ring").items():
            if marks and number - 1 in marks and number - 2 in marks:
                errors.append(abs(took_ns / (marks[number - 1] - marks[number - 2]) - 1))
    return max(errors, default=None)


def measured(ring: Path) -> dict[int, int]:
    """Duration in ns of each iteration that the shim measured, by the number of optimizer steps at its end."""
    if not ring.exists():
        return {}
    rows = RingReader(ring).snapshot()
    rows = rows[(rows["kind"] == int(Kind.DEVICE)) & (rows["op"] == int(Device.ITERATION))]
    return {number: ended - began for number, began, ended in rows[["peer", "wait_ns", "end_ns"]].tolist()}


def play_all(cases: Sequence[Case], folder: Path, environment: Mapping[str, str]) -> list[Told]:
    with ThreadPoolExecutor(_TOGETHER) as pool:
        jobs = [
            pool.submit(play, case, folder / f"case-{number}", environment)
            for number, case in enumerate(cases)
        ]
        try:
            return [job.result() for job in jobs]
        finally:
            for job in jobs:
                job.cancel()


@contextmanager
def mps(folder: Path) -> Iterator[Mapping[str, str]]:
    """The variables of processes that share the GPU by MPS; empty where it is not to be had."""
    folder.mkdir()
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }
    for path in variables.values():
        Path(path).mkdir()
    command = ["nvidia-cuda-mps-control"]
    try:
        subprocess.run([*command, "-d"], env={**os.environ, **variables}, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        yield {}
        return
    try:
        yield variables
    finally:
        subprocess.run(command, input=b"quit\n", env={**os.environ, **variables}, timeout=30, check=False)
