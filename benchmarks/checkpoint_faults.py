"""Seeded fault campaigns of the checkpoint engine, on real jobs: nothing promised is lost, nothing wrong restored.

    python -m benchmarks.checkpoint_faults --case all --parallel 2

Every seed runs one training under ``keepstep run``, kills at a drawn moment, lets it resume, and compares: the losses
of every step with those of an undisturbed training, bit by bit; the state that came back with what was saved, by
checksum; the step with the newest that was promised. One JSON per seed is kept under ``--out``, failed ones too; seeds
that have one are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks._checkpoint_job import Mark, Phase
from benchmarks._report import Line, Report
from benchmarks.campaign import wilson, write

_ROOT = Path(__file__).resolve().parent.parent
_JOB = Path(__file__).with_name("_checkpoint_job.py")
STEPS = 10
RANKS = 2
_PATIENCE_S = 120.0
GOAL = "0 wrong restores, 0 lost checkpoints that were promised"


@dataclass(frozen=True)
class Kill:
    """SIGKILL for ``rank``, ``after_s`` after it is first seen in ``phase`` with this mark's number or a later one."""

    rank: int
    phase: Phase
    number: int
    after_s: float


@dataclass(frozen=True)
class Plan:
    """One seed: the kills, one after the other."""

    kills: tuple[Kill, ...]


def _moment(chances: random.Random, longest: float = -1.5) -> float:
    """From microseconds, in which a record is written, to tens of milliseconds, in which a state is copied."""
    return 10 ** chances.uniform(-5, longest)


def _while_saving(phase: Phase, longest: float) -> Callable[[random.Random], Plan]:
    def plan(chances: random.Random) -> Plan:
        after_s = _moment(chances, longest)
        return Plan((Kill(chances.randrange(RANKS), phase, chances.randint(1, STEPS - 2), after_s),))

    return plan


def _while_restoring(chances: random.Random) -> Plan:
    first = Kill(chances.randrange(RANKS), Phase.SEAL, chances.randint(2, STEPS - 2), _moment(chances))
    return Plan((first, Kill(chances.randrange(RANKS), Phase.RESTORE, 1, _moment(chances))))


CASES: dict[str, Callable[[random.Random], Plan]] = {
    "worker-at-save": _while_saving(Phase.SAVE, -2.8),
    "worker-at-seal": _while_saving(Phase.SEAL, -1.5),
    "worker-at-restore": _while_restoring,
}


class _Killer:
    """Carries out the kills of a plan on a running job."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._left = list(plan.kills)
        self._folder = folder
        self._marks: dict[int, Mark] = {}
        self.done: list[dict[str, Any]] = []

    def look(self) -> None:
        """Kill when the time has come; returns at once otherwise."""
        if not self._left:
            return
        kill = self._left[0]
        path = self._folder / f"mark-{kill.rank}"
        if kill.rank not in self._marks:
            if not path.exists() or path.stat().st_size == 0:
                return
            self._marks[kill.rank] = Mark(path)
        pid, phase, number = self._marks[kill.rank].get()
        if pid in {one["pid"] for one in self.done} or phase != kill.phase or number < kill.number:
            return
        until = time.perf_counter() + kill.after_s
        while time.perf_counter() < until:
            pass
        _, found, at = self._marks[kill.rank].get()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.done.append({"pid": pid, "phase": Phase(found).name.lower(), "number": at})
        self._left.pop(0)

    @property
    def is_over(self) -> bool:
        return not self._left


def run(plan: Plan, folder: Path) -> tuple[int, str, list[dict[str, Any]]]:
    """Run a job with the plan's kills: exit code, what was said, and the moments of the kills."""
    command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run"), "--no-watch"]
    command += ["--nproc-per-node", str(RANKS), "--max-restarts", str(len(plan.kills))]
    command += [str(_JOB), str(folder), str(STEPS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    killer = _Killer(plan, folder)
    with (folder / "console.txt").open("wb") as console:
        job = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + _PATIENCE_S
        while job.poll() is None:
            if time.monotonic() > deadline:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
                break
            killer.look()
            time.sleep(0.01 if killer.is_over else 20e-6)
    return job.returncode, (folder / "console.txt").read_text(errors="replace"), killer.done


def ledger(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank noted; a last line that its death cut short is left out."""
    found: list[dict[str, Any]] = []
    with suppress(OSError):
        for line in (folder / f"ledger-{rank}").read_text().splitlines():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def losses(folder: Path, rank: int) -> dict[int, set[str]]:
    """All losses of each step, of whatever incarnation."""
    found: dict[int, set[str]] = {}
    with suppress(OSError):
        for line in (folder / f"loss-{rank}").read_text().splitlines():
            step, _, loss = line.partition(" ")
            found.setdefault(int(step), set()).add(loss)
    return found


@cache
def undisturbed() -> dict[int, dict[int, set[str]]]:
    """The losses of a training that nothing happens to, by rank."""
    with tempfile.TemporaryDirectory() as name:
        code, said, _ = run(Plan(()), Path(name))
        if code != 0:
            raise RuntimeError(f"the undisturbed training ended with {code}: {said[-400:]}")
        return {rank: losses(Path(name), rank) for rank in range(RANKS)}


def judge(plan: Plan, folder: Path, code: int, done: Sequence[object]) -> tuple[list[str], dict[str, Any]]:
    """What is wrong, a line each; and figures."""
    why: list[str] = []
    if code != 0:
        why.append(f"the job ended with {code}")
    if len(done) != len(plan.kills):
        why.append(f"{len(done)} of {len(plan.kills)} kills were carried out")
    notes = {rank: ledger(folder, rank) for rank in range(RANKS)}
    measured: dict[str, Any] = {"resumed": [], "promised": []}
    for incarnation in range(1, len(plan.kills) + 1):
        starts = {
            note["step"]
            for rank in notes
            for note in notes[rank]
            if note["what"] == "resumed" and note["incarnation"] == incarnation
        }
        if not starts and incarnation < len(plan.kills):
            continue  # killed before it could say so
        promised = min(_newest_sealed(notes[rank], incarnation) for rank in notes)
        measured["resumed"].append(sorted(starts))
        measured["promised"].append(promised)
        if len(starts) != 1:
            why.append(f"the ranks went on from steps {sorted(starts)}")
        elif min(starts) < promised:
            why.append(f"step {promised} was sealed on all ranks, the job went on from {min(starts)}")
    for rank, own in notes.items():
        sums: dict[int, set[int]] = {}
        for note in own:
            if note["what"] == "saved":
                sums.setdefault(note["step"], set()).add(note["sum"])
        for note in own:
            if note["what"] == "still" and not note["same"]:
                why.append(f"rank {rank}: the state changed while step {note['step']} was copied")
            if note["what"] == "resumed" and note["found"] and {note["sum"]} != sums.get(note["step"]):
                why.append(f"rank {rank}: what came back as step {note['step']} is not what was saved")
        if losses(folder, rank) != undisturbed()[rank]:
            why.append(f"rank {rank}: its losses are not those of the undisturbed training")
    return why, measured


def _newest_sealed(notes: Sequence[dict[str, Any]], before: int) -> int:
    """The newest step that a rank knew to be sealed in incarnations before this one; 0 without."""
    return max(
        (note["step"] for note in notes if note["what"] == "sealed" and note["incarnation"] < before),
        default=0,
    )


def run_seed(case: str, seed: int, out: Path) -> dict[str, Any]:
    """Run one seed and keep its result."""
    plan = CASES[case](random.Random(f"{case}:{seed}"))
    with tempfile.TemporaryDirectory() as name:
        folder, began = Path(name), time.monotonic()
        try:
            code, said, done = run(plan, folder)
            why, measured = judge(plan, folder, code, done)
        except Exception as error:  # a seed that breaks is a failed seed, and the campaign goes on
            why, measured, said, done = [f"{type(error).__name__}: {error}"], {}, "", []
        result = {
            "case": case,
            "seed": seed,
            "passed": not why,
            "why": why,
            "measured": measured,
            "plan": asdict(plan),
            "kills": done,
            "wall_s": round(time.monotonic() - began, 1),
            "console": said[-4000:].replace(name, "FOLDER") if why else "",
        }
        write(out / case / f"seed-{seed:03d}.json", result)
        if why:
            kept = _ROOT / "runs" / "checkpoint-faults" / f"{case}-{seed:03d}"
            shutil.copytree(folder, kept, dirs_exist_ok=True)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--case", action="append", choices=(*CASES, "all"), required=True)
    parser.add_argument("--seeds", type=int, default=100, help="seeds 0 to N-1 (default: 100)")
    parser.add_argument("--out", type=Path, default=_ROOT / "benchmarks" / "results" / "checkpoint-faults")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="jobs at once")
    parser.add_argument("--summary-only", action="store_true", help="run nothing, summarise what is there")
    parser.add_argument("--json", type=Path, help="where to write the summary (default: in --out)")
    arguments = parser.parse_args(argv)
    report = Report("checkpoint_faults", quick=False)
    for case in CASES if "all" in arguments.case else dict.fromkeys(arguments.case):
        folder = arguments.out / case
        todo = [seed for seed in range(arguments.seeds) if not (folder / f"seed-{seed:03d}.json").exists()]
        if todo and not arguments.summary_only:
            undisturbed()
            with ThreadPoolExecutor(arguments.parallel) as pool:
                for result in pool.map(lambda seed, case=case: run_seed(case, seed, arguments.out), todo):
                    state = "passed" if result["passed"] else "FAILED: " + "; ".join(result["why"])
                    print(f"{case} seed {result['seed']}: {state} ({result['wall_s']} s)", flush=True)
        results = [json.loads(path.read_text()) for path in sorted(folder.glob("seed-*.json"))]
        if not results:
            report.leave_out(case, "no results")
            continue
        passed = sum(result["passed"] for result in results)
        low, high = wilson(passed, len(results))
        limit = f"Wilson 95 %: {low:.2f} to {high:.2f}; 2 ranks, DDP, Gloo"
        report.add(Line(case, f"{passed}/{len(results)}", "seeds", GOAL, passed == len(results), limit=limit))
    report.finish(arguments.json or arguments.out / "summary.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
