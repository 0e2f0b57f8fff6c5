"""Validation while held, of a real job on busy cores: nobody is accused without cause, and who is really slow is named.

    python -m benchmarks.validate [--quick] [--json FILE]

Eight ranks of the example train (compute emulated; the tests of devices and links are real) while one more process
keeps a core busy. Healthy validations come first. Then one rank after another gets a CPU quota far below its share
(cgroup, needs root) while it is validated. A refused one is counted and asked for again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks.campaign.trial import ROOT, processes_of

TRAIN = ROOT / "examples" / "gpt" / "train.py"
RANKS = 8
HEALTHY, SLOW = 20, 10
HEALTHY_GOAL = "20 of 20 accuse nobody"
SLOW_GOAL = "the slow rank named in 10 of 10, with its figure"
TIME_GOAL = "whole validation ≤ 5 s on the test machine for 8 ranks"
TIME_BUDGET_S = 5.0
QUOTA = 0.04  # of a core: eight ranks on two busy cores have about a fifth of one each
_PERIOD_US = 100_000
_WARM_STEPS = 8
_ASK_AGAIN = 4
_START_S, _ANSWER_S = 300.0, 120.0
_SCRIPT = ("--dp", "4", "--pp", "2", "--layers", "2", "--steps", "100000", "--emulate-compute-ms", "20")


@contextmanager
def job(folder: Path) -> Iterator[Path]:
    """The run's folder of a training of eight ranks that has done its first steps; ended afterwards."""
    run = folder / "run"
    watched = [sys.executable, "-m", "keepstep.cli", "run", "--no-validate", "--run-dir", str(run)]
    with open(folder / "console.txt", "wb") as log:
        launcher = subprocess.Popen(
            [*watched, "--nproc-per-node", str(RANKS), str(TRAIN), *_SCRIPT], stdout=log, stderr=log
        )
    try:
        iterations = run / "nodes" / "0" / "iterations.jsonl"
        until_s = time.monotonic() + _START_S
        while not iterations.exists() or iterations.read_bytes().count(b"\n") < _WARM_STEPS:
            if launcher.poll() is not None or time.monotonic() > until_s:
                raise SystemExit((folder / "console.txt").read_text(errors="replace")[-2000:])
            time.sleep(0.2)
        yield run
    finally:
        launcher.terminate()
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(30)
        launcher.kill()
        launcher.wait()


@contextmanager
def busy_core() -> Iterator[None]:
    """A process that computes all the time."""
    hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        hog.kill()
        hog.wait()


@contextmanager
def cpu_quota(pid: int, share: float) -> Iterator[None]:
    """The process gets at most ``share`` of a core. Raises OSError where cgroups cannot be made."""
    old = Path("/sys/fs/cgroup/cpu")
    top = old if old.exists() else Path("/sys/fs/cgroup")
    group = top / f"keepstep-bench-{os.getpid()}"
    group.mkdir()
    try:
        quota_us = int(share * _PERIOD_US)
        if top is old:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with suppress(ProcessLookupError):
            (top / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def worker(run: Path, rank: int) -> int:
    """The process number of a rank."""
    for pid, line in processes_of(run).items():
        if str(TRAIN) in line and f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_text().split("\0"):
            return pid
    raise SystemExit(f"rank {rank} of {run} is gone")


def validate(run: Path) -> dict[str, Any]:
    """One validation as ``--json`` tells it, with ``command_s``; ``refused`` alone where there was none."""
    command = [sys.executable, "-m", "keepstep.cli", "validate", str(run), "--json"]
    begun_s = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    if done.returncode not in (0, 1):
        return {"refused": done.stderr.strip().rpartition("not validated: ")[2]}
    return {**json.loads(done.stdout), "command_s": time.monotonic() - begun_s}


def shorter(found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of one validation."""
    if "refused" in found:
        return found
    return {
        "devices": {
            one["figure"]["rank"]: (round(one["figure"]["value"], 4), round(one["median"], 4))
            for one in found["devices"]
        },
        "links": {
            f"{one['source']}-{one['target']}": (round(one["bytes_per_s"] / 1e6), round(one["median"] / 1e6))
            for one in found["links"]
        },
        "missing": found["missing"],
        "held_s": round(found["held_s"], 2),
        "command_s": round(found["command_s"], 2),
        "figures": {
            one["rank"]: round(one["value"], 4) for rank in found["figures"] for one in rank["devices"]
        },
    }


def main() -> int:
    parser = bench_arguments("validate", "What a validation of a held job says, on busy cores.")
    parser.add_argument(
        "--trials", type=Path, metavar="FILE", help="also write every validation, one JSON line each"
    )
    options = parser.parse_args()
    healthy, slow = (5, 3) if options.quick else (HEALTHY, SLOW)
    report = Report("validate", quick=options.quick)
    trials: list[dict[str, Any]] = []

    def one(slow_rank: int | None) -> dict[str, Any]:
        for _ in range(_ASK_AGAIN):
            found = {"slow_rank": slow_rank, **shorter(validate(run))}
            trials.append(found)
            print(json.dumps(found), flush=True)
            if "refused" not in found:
                break
        return found

    with (
        tempfile.TemporaryDirectory(prefix="keepstep-validate-") as folder,
        job(Path(folder)) as run,
        busy_core(),
    ):
        alike = [one(None) for _ in range(healthy)]
        named: list[dict[str, Any]] = []
        try:
            for number in range(slow):
                rank = number % RANKS
                with cpu_quota(worker(run, rank), QUOTA):
                    named.append(one(rank))
        except OSError as error:
            report.leave_out("a slow rank", f"no cgroup can be made: {error}")
    clean = sum(found.get("devices") == {} and found.get("links") == {} for found in alike)
    report.add(
        Line("healthy, nobody accused", f"{clean}/{healthy}", "validations", HEALTHY_GOAL, clean == healthy)
    )
    if named:
        right = sum(found["slow_rank"] in found.get("devices", {}) for found in named)
        wrong = sum(
            bool(set(found.get("devices", ())) - {found["slow_rank"]} or found.get("links"))
            for found in named
        )
        limit = f"a CPU quota of {QUOTA:g} of a core"
        report.add(
            Line("slow rank named", f"{right}/{slow}", "validations", SLOW_GOAL, right == slow, limit=limit)
        )
        report.add(Line("somebody else named too", f"{wrong}/{slow}", "validations", None, wrong == 0))
    times = sorted(found["held_s"] for found in alike + named if "held_s" in found)
    commands = sorted(found["command_s"] for found in alike + named if "held_s" in found)
    if times:
        report.add(Line("held, longest", times[-1], "s", TIME_GOAL, times[-1] <= TIME_BUDGET_S))
        report.add(Line("held, median", times[len(times) // 2], "s"))
        report.add(Line("from the command to its answer, median", commands[len(commands) // 2], "s"))
    refused = [found["refused"] for found in trials if "refused" in found]
    why = "; ".join(sorted(set(refused)))
    report.add(Line("refused, and asked for again", len(refused), "times", limit=why or None))
    if options.trials:
        options.trials.parent.mkdir(parents=True, exist_ok=True)
        options.trials.write_text("".join(json.dumps(found) + "\n" for found in trials))
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
