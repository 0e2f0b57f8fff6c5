"""The shipped examples in place: a rank is killed, all others go on in their processes, and no bit of a loss differs.

    python -m benchmarks.recovery.examples [--seeds 10] [--first 0] [--example train.py] [--json FILE]

Each seed is a job of its own for each of ``examples/recover``, which make their default group before the training. Rank
and step are drawn; the rank is killed by SIGKILL. Told are how many went on so, and the median time until all ranks
train again, as the incident tells it.

With ``--json FILE.json`` each result is written at once, to FILE-trials.jsonl; the same command, given again at the
same commit of the code, goes on where it was ended.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from benchmarks._report import Line, Report, bench_arguments
from benchmarks._trials import Trials
from benchmarks.checkpoint_faults.campaign import ROOT

GOAL = "10 of 10 go on in the survivors' processes, bit-equal"
PATIENCE_S = 400.0
LEAVE_S = 30  # the usual 3 s are too few where many ranks share few cores with other work
_AFTER = 5  # steps behind that of the kill after which processes are counted


class Example(NamedTuple):
    """How one is run."""

    ranks: int
    steps: int


EXAMPLES = {"train.py": Example(4, 400), "fsdp2.py": Example(4, 400), "tp_pp_dp.py": Example(8, 60)}

_REPLACED = re.compile(r"begins? anew in another process|does not leave its training")
_Losses = dict[str, dict[int, set[str]]]  # by file and step: what was written, by whatever process


def start(name: str, folder: Path, *flags: str) -> subprocess.Popen[bytes]:
    """Run an example that writes its losses to the folder."""
    command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run"), *flags]
    command += ["--nproc-per-node", str(EXAMPLES[name].ranks), str(ROOT / "examples" / "recover" / name)]
    with (folder / "console.txt").open("ab") as console:
        return subprocess.Popen(
            [*command, str(EXAMPLES[name].steps), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "KEEPSTEP_LEAVE_S": str(LEAVE_S)},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
        )


def losses(folder: Path) -> _Losses:
    """What all ranks that have losses have written."""
    found: _Losses = {}
    for path in folder.glob("losses-*"):
        by_step = found.setdefault(path.name, {})
        for line in path.read_text().rpartition("\n")[0].splitlines():
            step, _, text = line.partition(" ")
            by_step.setdefault(int(step), set()).add(text)
    return found


def newest(folder: Path) -> int:
    """The newest step of all; -1: there is none."""
    return max((step for by_step in losses(folder).values() for step in by_step), default=-1)


def workers(folder: Path) -> dict[int, psutil.Process]:
    """The processes that were started as ranks, by rank: standbys were not."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words, rank = process.cmdline(), process.environ().get("RANK")
            if str(folder) in words and rank and not any(word.endswith("standby.py") for word in words):
                found[int(rank)] = process
    return found


def lives(process: psutil.Process) -> bool:
    """Whether it is still this process, and no zombie."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait(process: subprocess.Popen[bytes], folder: Path, step: int) -> None:
    """Wait until a rank has made that step. Raises RuntimeError or TimeoutError."""
    deadline_s = time.monotonic() + PATIENCE_S
    while newest(folder) < step:
        if process.poll() is not None:
            raise RuntimeError(f"the job ended with {process.returncode} before step {step}")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"step {step} was not made within {PATIENCE_S:g} s")
        time.sleep(0.02)


def end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End what is left of a job: workers are in sessions of their own."""
    left = [process.pid, *(one.pid for one in workers(folder).values())]
    for pid in left:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    process.wait()


@functools.cache
def undisturbed(name: str) -> _Losses:
    """The losses of an example that nothing happens to."""
    with tempfile.TemporaryDirectory(prefix="keepstep-examples-") as text:
        folder = Path(text)
        process = start(name, folder, "--no-watch")
        try:
            if process.wait(PATIENCE_S):
                raise RuntimeError(f"the undisturbed {name} ended with {process.returncode}")
            return losses(folder)
        finally:
            end(process, folder)


def disturbed(name: str, seed: int) -> dict[str, Any]:
    """Kill a rank; "failed" says what is wrong."""
    expected = undisturbed(name)
    chances = random.Random(f"examples:{name}:{seed}")
    ranks, steps = EXAMPLES[name]
    victim, at = chances.randrange(ranks), chances.randint(steps // 8, steps // 2)
    with tempfile.TemporaryDirectory(prefix="keepstep-examples-") as text:
        folder = Path(text)
        process = start(name, folder, "-v", "--in-place", "--standbys", "1", "--max-restarts", "1")
        try:
            wait(process, folder, at)
            first = workers(folder)
            first[victim].kill()
            killed_at = newest(folder)
            wait(process, folder, killed_at + _AFTER)
            stayed = sum(rank != victim and lives(one) for rank, one in first.items())
            code = process.wait(PATIENCE_S)
            found = losses(folder)
        finally:
            end(process, folder)
        recoveries = [
            recovery
            for path in (folder / "run" / "incidents").glob("*.json")
            if (recovery := json.loads(path.read_text()).get("recovery"))
        ]
        said = (folder / "console.txt").read_text(errors="replace")
    why = [line for line in said.splitlines() if _REPLACED.search(line)][:1]
    why += [f"{stayed} of {ranks - 1} processes stayed"] if stayed != ranks - 1 else []
    why += [f"ended with {code}"] if code else []
    why += ["losses differ from those of an undisturbed run"] if found != expected else []
    survived = [one["survived"] for one in recoveries if one["rank"] == victim]
    why += [f"the incident tells of {survived} that survived"] if survived != [ranks - 1] else []
    again_s = recoveries[0]["seconds"] if recoveries else None
    told = {"rank": victim, "step": killed_at, "ranks": ranks, "stayed": stayed, "again_s": again_s}
    return {**told, "failed": "; ".join(why)}


def main() -> int:
    """Run the bench."""
    parser: argparse.ArgumentParser = bench_arguments("recovery.examples", __doc__ or "")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="jobs of each example (10)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (0)")
    parser.add_argument("--example", action="append", choices=EXAMPLES, help="default: all")
    given = parser.parse_args()
    report = Report("recovery_examples", packages=("torch", "keepstep"), quick=given.quick)
    trials = Trials(given.json and given.json.with_name(f"{given.json.stem}-trials.jsonl"))
    for name in given.example or EXAMPLES:
        seeds = range(given.first, given.first + (1 if given.quick else given.seeds))
        results = [trials.result(name, seed, functools.partial(disturbed, name, seed)) for seed in seeds]
        report.add(_line(name, results))
    report.finish(given.json)
    return 0


def _line(name: str, results: list[dict[str, Any]]) -> Line:
    good = [one for one in results if not one["failed"]]
    took = [one["again_s"] for one in good if one["again_s"] is not None]
    spread = f"; all train again after {statistics.median(took):.2f} s (median)" if took else ""
    wrong = "".join(f"; seed {one['seed']}: {one['failed']}" for one in results if one["failed"])
    return Line(
        f"{name}, {EXAMPLES[name].ranks} ranks, kill -9 of one{spread}",
        f"{len(good)} of {len(results)}",
        "",
        GOAL,
        len(good) == len(results),
        limit=f"one machine, Gloo, one standby, {LEAVE_S} s to leave{wrong}",
    )


if __name__ == "__main__":
    sys.exit(main())
