"""Recoveries on one GPU: a rank is killed, raises, or its kernel fails; by a warm standby, and in place beside it.

One job for each way; its faults come one after the other, each once standbys are warm again. The victim is the last
rank. In place two ranks share the GPU, and rank 0 is to go on in its process.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench, Running
from benchmarks.gpu.driver_looks import looks
from benchmarks.gpu.judge import Look, Told, freed, until_next_step
from benchmarks.stand_in.aborts import Losses, differing, losses_of

SESSION = Path(__file__).parents[1] / "stand_in" / "jobs" / "session.py"
FAULTS = {"die": "kill -9", "raise": "exception", "illegal-address": "kernel error"}
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "warm standby": (1, ()),
    "in place": (2, ("--in-place",)),
}
ROUNDS, QUICK_ROUNDS = 3, 1
FLAGS = (
    "--max-restarts",
    "99",
    "--restart-budget",
    "rank=0,node=0,hour=0,same=0",
    "--verbose",
    "--no-validate",
)
WARM = "standbys are warm"
_STEPS = 1_000_000
_PAUSE_S = 0.05
_BALLAST_GB, _STAND_IN_GB = 8.0, 1.0
_PATIENCE_S = 60.0  # for warm standbys, and for a recovery
_PLAIN_S = 20.0  # of a way's time, for the training to which nothing happens


@dataclass(slots=True)
class Trial:
    """What came of a way: seconds by fault, what the driver told of killed processes, and the losses of all steps."""

    seconds: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    memory: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    look_s: float = 0.0
    recoveries: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    differing: int | None = None
    steps: int = 0


def recovery(bench: Bench) -> None:
    """Both ways; the first has half of the time."""
    folder = bench.room("recovery")
    for place, (way, (ranks, flags)) in enumerate(WAYS.items()):
        until_s = time.monotonic() + bench.left_s() / (len(WAYS) - place)
        trial = Trial()
        try:
            play(bench, folder / f"way-{place}", ranks, flags, until_s, way, trial)
        except RuntimeError as error:
            bench.report.leave_out(f"recovery, {way}", str(error))
        shown(bench, way, ranks, trial)


def play(
    bench: Bench, folder: Path, ranks: int, flags: Sequence[str], until_s: float, way: str, trial: Trial
) -> None:
    """The job of a way with its faults, then the same training without any. ``trial`` is filled as it goes."""
    rounds = QUICK_ROUNDS if bench.quick else ROUNDS
    gigabytes = _BALLAST_GB if bench.judged else _STAND_IN_GB
    settings = {
        "OMP_NUM_THREADS": "1",
        "PAUSE_S": str(_PAUSE_S),
        "BALLAST_GB": str(gigabytes),
        "STAND_IN_NOTES": str(folder),
        "KEEPSTEP_STANDBY_IDLE_S": "0.5",
    }
    words, order = [SESSION, str(_STEPS), folder], folder / f"order-{ranks - 1}"
    with bench.running(words, folder, ranks=ranks, flags=(*FLAGS, *flags), settings=settings) as running:
        warm = 0
        for number in range(rounds * len(FAULTS)):
            what = list(FAULTS)[number % len(FAULTS)]
            if time.monotonic() > until_s - _PLAIN_S:
                name = f"recovery, {way}: {FAULTS[what]} {number // len(FAULTS) + 1} of {rounds}"
                bench.report.leave_out(name, "no time left")
                continue
            warm = running.wait_for(
                lambda seen=warm: (now := running.console().count(WARM)) > seen and now,
                "warm standbys",
                time.monotonic() + _PATIENCE_S,
            )
            strike(running, order, what, ranks, int(gigabytes * 2**30), trial)
    found = losses_of(folder, ranks)
    trial.recoveries = recovered(folder)
    trial.steps = 1 + min(max(steps) for steps in found)
    trial.differing = differing(
        found, undisturbed(bench, folder, ranks, 1 + max(max(steps) for steps in found))
    )


def strike(running: Running, order: Path, what: str, ranks: int, held: int, trial: Trial) -> None:
    """Have the last rank fail in one way, and wait until all have made a step again."""
    folder, victim = running.folder, ranks - 1
    struck_before = len(truths(folder, victim))
    pid = trained(folder, victim)[1]
    with looks() as found:
        time.sleep(0.1)  # looks from before
        give_order(order, f"{what} backward")
        until_s = time.monotonic() + _PATIENCE_S
        running.wait_for(lambda: len(truths(folder, victim)) > struck_before, "the fault", until_s)
        struck_s = truths(folder, victim)[-1]["unix_s"]

        def took() -> float | None:
            return until_next_step(struck_s, [trained(folder, rank)[0] for rank in range(ranks)])

        trial.seconds.setdefault(what, []).append(running.wait_for(took, "a step after the fault", until_s))
    if what == "die" and found:
        trial.memory.append(freed(found, pid, struck_s, held))
        trial.look_s = max(trial.look_s, pause_of(found))


def give_order(path: Path, text: str) -> None:
    """Have a rank of the job find its order whole."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)


def pause_of(found: Sequence[Look]) -> float:
    """Seconds from one look to the next."""
    return (found[-1].at_s - found[0].at_s) / max(len(found) - 1, 1)


def truths(folder: Path, rank: int) -> list[dict[str, Any]]:
    """When a rank began to fail."""
    path = folder / f"truth-{rank}.jsonl"
    return [json.loads(line) for line in whole_lines(path)]


def trained(folder: Path, rank: int) -> tuple[dict[int, float], int]:
    """When a rank had made its first step, by incarnation, and its process."""
    told, times = told_steps(folder, rank), dict[int, float]()
    for one in told:
        times.setdefault(one.incarnation, one.at_s)
    return times, told[-1].pid if told else 0


def told_steps(folder: Path, rank: int) -> list[Told]:
    """The first steps of each incarnation of a rank."""
    lines = [line.split() for line in whole_lines(folder / f"trained-{rank}")]
    return [Told(int(which), int(pid), float(at_s), int(step)) for which, pid, at_s, step in lines]


def whole_lines(path: Path) -> list[str]:
    return path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []


def recovered(folder: Path) -> list[Mapping[str, Any]]:
    """What keepstep itself noted of each recovery."""
    told = (json.loads(path.read_bytes()) for path in sorted((folder / "run" / "incidents").glob("*.json")))
    return [one["recovery"] for one in told if one.get("recovery")]


def undisturbed(bench: Bench, folder: Path, ranks: int, steps: int) -> Losses:
    """The losses of the same training without faults. Raises RuntimeError where it does not come to its end."""
    plain = folder.with_name(f"{folder.name}-plain")
    with bench.running([SESSION, str(steps), plain], plain, ranks=ranks, flags=("--no-validate",)) as running:
        end_s = time.monotonic() + 4 * _PATIENCE_S
        while running.launcher.poll() is None and time.monotonic() < end_s:
            time.sleep(0.05)
        if running.launcher.returncode != 0:
            raise RuntimeError(f"the training without faults: exit code {running.launcher.returncode}")
    return losses_of(plain, ranks)


def shown(bench: Bench, way: str, ranks: int, trial: Trial) -> None:
    """The figures of a way."""
    shared = "; two ranks on one GPU, over sockets" if ranks > 1 else ""
    limit = f"a small model, steps of {1000 * _PAUSE_S:.0f} ms by sleeping{shared}"
    for what, took in trial.seconds.items():
        peers = {"from": round(min(took), 2), "to": round(max(took), 2), "times": len(took)}
        name = f"{FAULTS[what]} to the next step of all, {way}"
        bench.add(name, statistics.median(took), "s", peers=peers, limit=limit)
    if trial.recoveries:
        for told, who, each in (
            ("standbys", "ranks taken over by warm standbys", 1),
            ("survived", "ranks that went on in their process", ranks - 1),
        ):
            count, wanted = sum(one[told] for one in trial.recoveries), each * len(trial.recoveries)
            peers = phases(trial.recoveries) if told == "standbys" else {}
            if wanted:
                name, value = f"{way}: {who}", f"{count} of {wanted}"
                bench.add(name, value, "", met=count == wanted, peers=peers, limit=limit)
    for name in ("not listed (s)", "memory free (s)"):
        times = [one[name] for one in trial.memory if name in one]
        what = f"killed process, {way}: {name.removesuffix(' (s)')}"
        if times:
            peers = {"from": round(min(times), 3), "to": round(max(times), 3)}
            peers["from look to look (s)"] = round(trial.look_s, 3)
            bench.add(what, statistics.median(times), "s", peers=peers, limit="by NVML, after SIGKILL")
        elif "die" in trial.seconds:
            bench.report.leave_out(what, "the driver did not tell")
    if trial.differing is not None:
        name = f"losses that differ from an undisturbed training's, {way}"
        bench.add(
            name, trial.differing, "", met=trial.differing == 0, peers={"steps": trial.steps, "ranks": ranks}
        )


def phases(recoveries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median seconds of each phase of a recovery, as keepstep tells them."""
    found: dict[str, list[float]] = {}
    for name, seconds in (phase for one in recoveries for phase in one["phases"]):
        found.setdefault(f"{name} (s)", []).append(seconds)
    return {name: round(statistics.median(times), 3) for name, times in found.items()}
