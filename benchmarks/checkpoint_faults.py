"""Seeded fault campaigns of the checkpoint engine, on real jobs: nothing promised is lost, nothing wrong restored.

    python -m benchmarks.checkpoint_faults --case all --parallel 2

Every seed runs one training under ``keepstep run``, kills or lets the storage fail at drawn moments, lets it resume
(with storage: in a second ``keepstep run`` whose caches are empty), and compares: the losses of every step with those
of an undisturbed training, bit by bit; the state that came back with what was saved, by checksum; the step with the
newest that was promised. One JSON per seed is kept under ``--out``, failed ones too; seeds that have one are not run
again.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks._campaign_trial import processes_of
from benchmarks._checkpoint_job import Mark, Phase
from benchmarks._report import Line, Report
from benchmarks.campaign import wilson, write

_ROOT = Path(__file__).resolve().parent.parent
_JOB = Path(__file__).with_name("_checkpoint_job.py")
STEPS = 10
LATER_STEPS = 13  # of the second run
EVERY = 3  # steps between those that the script asks to have on storage
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
    """One seed: kills of ranks, one after the other; and what becomes of the way to storage.

    Attributes:
        kills: of ranks.
        storage: "" without one; "sound"; "faulty": reads, writes, fsync and rename fail, are cut short or change bits,
            for ``faulty_s`` seconds; "full": has no room for ``faulty_s`` seconds.
        seed: of the storage's faults.
        faulty_s: how long they last.
        program: "agent" or "launcher" (with all that it started) is killed...
        after_s: ...so many seconds after the ``folders``-th step's folder is seen on storage.
        folders: see there.
    """

    kills: tuple[Kill, ...] = ()
    storage: str = ""
    seed: int = 0
    faulty_s: float = 0.0
    program: str = ""
    after_s: float = 0.0
    folders: int = 1


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


def _while_persisting(program: str) -> Callable[[random.Random], Plan]:
    def plan(chances: random.Random) -> Plan:
        after_s = 10 ** chances.uniform(-4, -0.5)
        return Plan(storage="sound", program=program, after_s=after_s, folders=chances.randint(1, 3))

    return plan


def _on_storage(kind: str) -> Callable[[random.Random], Plan]:
    def plan(chances: random.Random) -> Plan:
        return Plan(storage=kind, seed=chances.randrange(1 << 30), faulty_s=chances.uniform(8, 20))

    return plan


CASES: dict[str, Callable[[random.Random], Plan]] = {
    "worker-at-save": _while_saving(Phase.SAVE, -2.8),
    "worker-at-seal": _while_saving(Phase.SEAL, -1.5),
    "worker-at-restore": _while_restoring,
    "agent-at-persist": _while_persisting("agent"),
    "launcher-at-persist": _while_persisting("launcher"),
    "storage-faulty": _on_storage("faulty"),
    "storage-full": _on_storage("full"),
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


class _Killed:
    """Kills the agent or the launcher of a running job when the time has come, once."""

    def __init__(self, plan: Plan, folder: Path, launcher: int) -> None:
        self._plan, self._folder, self._launcher = plan, folder, launcher
        self._at = 0.0
        self.done = ""

    def look(self) -> None:
        if not self._plan.program or self.done:
            return
        now = time.monotonic()
        if not self._at:
            if len(steps_on(self._folder / "storage")) >= self._plan.folders:
                self._at = now + self._plan.after_s
        elif now >= self._at:
            pid = self._launcher if self._plan.program == "launcher" else self._agent()
            if pid:
                os.kill(pid, signal.SIGKILL)
                self.done = self._plan.program

    def _agent(self) -> int:
        for pid, line in processes_of(self._folder / "run").items():
            if "keepstep.agent" in line:
                return pid
        return 0


def steps_on(storage: Path) -> list[Path]:
    """Folders of steps on storage, whole or not."""
    return sorted(storage.glob("step-*"))


def whole_steps(storage: Path) -> list[int]:
    """Steps on storage that have a manifest: those that are promised."""
    return [int(path.name.split("-")[1]) for path in steps_on(storage) if (path / "manifest.json").exists()]


def run(
    plan: Plan, folder: Path, steps: int = STEPS, number: int = 0
) -> tuple[int, str, list[dict[str, Any]]]:
    """Run a job in ``folder`` as planned: exit code, what was said, and the moments of the kills."""
    storage = folder / "storage"
    command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run")]
    command += ["--nproc-per-node", str(RANKS), "--max-restarts", str(len(plan.kills))]
    if plan.storage:
        command += [
            "--checkpoint-dir",
            str(storage),
            "--checkpoint-every",
            str(EVERY),
            "--checkpoint-keep",
            "9",
        ]
    else:
        command += ["--no-watch"]
    command += [str(_JOB), str(folder), str(steps), str(number), str(EVERY if plan.storage else 0)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    if plan.storage == "faulty" and plan.faulty_s:
        environment |= {
            "LD_PRELOAD": str(faulty_library()),
            "FAULTY_PREFIX": str(storage),
            "FAULTY_SEED": str(plan.seed),
            "FAULTY_RATE": "0.15",
            "FAULTY_UNTIL": str(time.time() + plan.faulty_s),
        }
    killer = _Killer(plan, folder)
    with (folder / "console.txt").open("ab") as console:
        job = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        killed = _Killed(plan, folder, job.pid)
        began = time.monotonic()
        while job.poll() is None:
            now = time.monotonic()
            if now > began + _PATIENCE_S:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
                break
            if plan.storage == "full" and now > began + plan.faulty_s:
                _make_room(storage)
            killer.look()
            killed.look()
            time.sleep(0.005 if killer.is_over else 20e-6)
    if killed.done == "launcher":
        _wait_for_the_end(folder / "run")
    done = killer.done + [{"program": killed.done}] * bool(killed.done)
    return job.returncode, (folder / "console.txt").read_text(errors="replace"), done


def _wait_for_the_end(run_folder: Path) -> None:
    """Until all that a killed launcher started has ended."""
    deadline = time.monotonic() + 30
    while processes_of(run_folder) and time.monotonic() < deadline:
        time.sleep(0.05)


@cache
def faulty_library() -> Path:
    """What is preloaded to make storage fail; compiled once."""
    source = Path(__file__).with_name("_faulty_storage.cpp")
    library = Path(tempfile.mkdtemp(prefix="keepstep-faulty-")) / "faulty.so"
    atexit.register(shutil.rmtree, library.parent, ignore_errors=True)
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True)
    return library


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of its own at ``folder``, too small for a rank's state. Needs root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "keepstep-full", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _make_room(folder: Path) -> None:
    if os.statvfs(folder).f_blocks * os.statvfs(folder).f_frsize < 1 << 29:
        subprocess.run(["mount", "-o", "remount,size=1g", str(folder)], check=True)


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
        code, said, _ = run(Plan(), Path(name), LATER_STEPS)
        if code != 0:
            raise RuntimeError(f"the undisturbed training ended with {code}: {said[-400:]}")
        return {rank: losses(Path(name), rank) for rank in range(RANKS)}


@dataclass
class Facts:
    """What happened in a seed."""

    codes: list[int] = field(default_factory=list)
    said: str = ""
    kills: list[dict[str, Any]] = field(default_factory=list)
    promised: int = 0  # newest step that stood whole on storage when the first run was over
    refused: int = 0  # second runs that found the storage too faulty to begin


def carry_out(plan: Plan, folder: Path) -> Facts:
    """The plan's run, and with storage a second one, which has nothing else to go on from."""
    facts = Facts()
    code, facts.said, facts.kills = run(plan, folder)
    facts.codes.append(code)
    if plan.storage:
        _wait_for_the_end(folder / "run")
        facts.promised = max(whole_steps(folder / "storage"), default=0)
        again = Plan(storage=plan.storage, seed=plan.seed + 1, faulty_s=plan.faulty_s)
        code, facts.said, _ = run(again, folder, LATER_STEPS, 1)
        if code != 0 and plan.storage == "faulty":
            facts.refused += 1
            code, facts.said, _ = run(Plan(storage="sound"), folder, LATER_STEPS, 2)
        facts.codes.append(code)
    return facts


def judge(plan: Plan, folder: Path, facts: Facts) -> tuple[list[str], dict[str, Any]]:
    """What is wrong, a line each; and figures."""
    why: list[str] = []
    ended = [-signal.SIGKILL if plan.program == "launcher" else 0] + [0] * bool(plan.storage)
    if facts.codes != ended:
        why.append(f"the job ended with {facts.codes}")
    if len(facts.kills) != len(plan.kills) + bool(plan.program):
        why.append(f"{len(facts.kills)} of {len(plan.kills) + bool(plan.program)} kills were carried out")
    notes = {rank: ledger(folder, rank) for rank in range(RANKS)}
    measured: dict[str, Any] = {"refused": facts.refused}
    if plan.storage:
        if plan.program != "launcher" and facts.promised != STEPS // EVERY * EVERY:
            why.append(
                f"the run ended with step {facts.promised} on storage, {STEPS // EVERY * EVERY} was wanted"
            )
        why += _went_on(notes, lambda note: note["run"] > 0, facts.promised, measured)
    for incarnation in range(1, len(plan.kills) + 1):
        promised = min(_newest_sealed(notes[rank], incarnation) for rank in notes)
        last = incarnation == len(plan.kills)
        found = _went_on(notes, lambda note, n=incarnation: note["incarnation"] == n, promised, measured)
        why += found if last or measured["resumed"] else []  # else killed before it could say so
    for rank, own in notes.items():
        why += _wrong_bytes(rank, own)
        expected = undisturbed()[rank]
        last_step = LATER_STEPS if plan.storage else STEPS
        if losses(folder, rank) != {step: expected[step] for step in range(last_step)}:
            why.append(f"rank {rank}: its losses are not those of the undisturbed training")
    return why, measured


def _went_on(
    notes: dict[int, list[dict[str, Any]]],
    which: Callable[[dict[str, Any]], bool],
    promised: int,
    measured: dict[str, Any],
) -> list[str]:
    """What is wrong with where an incarnation went on from."""
    starts = {n["step"] for own in notes.values() for n in own if n["what"] == "resumed" and which(n)}
    measured["resumed"], measured["promised"] = sorted(starts), promised
    if len(starts) != 1:
        return [f"the ranks went on from steps {sorted(starts)}"]
    if min(starts) < promised:
        return [f"step {promised} was promised, the job went on from {min(starts)}"]
    return []


def _wrong_bytes(rank: int, own: Sequence[dict[str, Any]]) -> Iterator[str]:
    sums: dict[int, set[int]] = {}
    for note in own:
        if note["what"] == "saved":
            sums.setdefault(note["step"], set()).add(note["sum"])
    for note in own:
        if note["what"] == "still" and not note["same"]:
            yield f"rank {rank}: the state changed while step {note['step']} was copied"
        if note["what"] == "resumed" and note["found"] and {note["sum"]} != sums.get(note["step"]):
            yield f"rank {rank}: what came back as step {note['step']} is not what was saved"


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
        folder, began, facts = Path(name), time.monotonic(), Facts()
        try:
            with small_disk(folder / "storage") if plan.storage == "full" else nullcontext():
                facts = carry_out(plan, folder)
                why, measured = judge(plan, folder, facts)
        except Exception as error:  # a seed that breaks is a failed seed, and the campaign goes on
            why, measured = [f"{type(error).__name__}: {error}"], {}
        result = {
            "case": case,
            "seed": seed,
            "passed": not why,
            "why": why,
            "measured": measured,
            "plan": asdict(plan),
            "kills": facts.kills,
            "wall_s": round(time.monotonic() - began, 1),
            "console": facts.said[-4000:].replace(name, "FOLDER") if why else "",
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
