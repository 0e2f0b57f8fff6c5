"""Seeded fault campaigns of the checkpoint engine, on real jobs: nothing promised is lost, nothing wrong restored.

    python -m benchmarks.checkpoint_faults --case all --parallel 2

Every seed runs one training under ``keepstep run``, kills or lets the storage fail at drawn moments, lets it resume
(with storage: in a second ``keepstep run`` whose caches are empty), and compares: the losses of every step with those
of an undisturbed training, bit by bit; the state that came back with what was saved, by checksum; the step with the
newest that was promised. ``seeds.jsonl`` in ``--out`` has a line for every seed, failed ones too; seeds that have one
are not run again.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.campaign.trial import processes_of
from benchmarks.checkpoint_faults.campaign import (
    JOB,
    NOT_OVER,
    ROOT,
    Campaign,
    Judged,
    ledger,
    losses,
    moment,
    other_losses,
    steps_on,
    wait_for_the_end,
    went_on,
    whole_steps,
    wrong_bytes,
)
from benchmarks.checkpoint_faults.job import Mark, Phase

STEPS = 10
LATER_STEPS = 13  # of the second run
EVERY = 3  # steps between those that the script asks to have on storage
RANKS = 2
_PATIENCE_S = 120.0


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


def _while_saving(phase: Phase, longest: float) -> Callable[[random.Random], Plan]:
    def plan(chances: random.Random) -> Plan:
        after_s = moment(chances, longest)
        return Plan((Kill(chances.randrange(RANKS), phase, chances.randint(1, STEPS - 2), after_s),))

    return plan


def _while_restoring(chances: random.Random) -> Plan:
    first = Kill(chances.randrange(RANKS), Phase.SEAL, chances.randint(2, STEPS - 2), moment(chances))
    return Plan((first, Kill(chances.randrange(RANKS), Phase.RESTORE, 1, moment(chances))))


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
        self._is_near = False
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
        if pid in {one["pid"] for one in self.done}:
            return
        self._is_near = phase < Phase.RESTORE and number >= kill.number - 1
        if phase != kill.phase or number < kill.number:
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
    def pause_s(self) -> float:
        """Until the next look: the last step before a kill is watched closely, without taking the CPU from the job."""
        if not self._left:
            return 0.005
        return 20e-6 if self._is_near else 1e-3


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


def run(
    plan: Plan, folder: Path, steps: int = STEPS, number: int = 0
) -> tuple[int, str, list[dict[str, Any]]]:
    """Run a job in ``folder`` as planned: exit code, what was said, and the moments of the kills."""
    storage = folder / "storage"
    command = [sys.executable, "-m", "keepstep.cli", "run", "--no-check", "--run-dir", str(folder / "run")]
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
    command += [str(JOB), str(folder), str(steps), str(number), str(EVERY if plan.storage else 0)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
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
                wait_for_the_end(folder / "run")
                raise TimeoutError(f"{NOT_OVER} {_PATIENCE_S:g} s")
            if plan.storage == "full" and now > began + plan.faulty_s:
                _make_room(storage)
            killer.look()
            killed.look()
            time.sleep(killer.pause_s)
    if killed.done == "launcher":
        wait_for_the_end(folder / "run")
    done = killer.done + [{"program": killed.done}] * bool(killed.done)
    return job.returncode, (folder / "console.txt").read_text(errors="replace"), done


@cache
def faulty_library() -> Path:
    """What is preloaded to make storage fail; compiled once."""
    source = Path(__file__).with_name("faulty_storage.cpp")
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
        wait_for_the_end(folder / "run")
        facts.promised = max(whole_steps(folder / "storage"), default=0)
        again = Plan(storage=plan.storage, seed=plan.seed + 1, faulty_s=plan.faulty_s)
        code, facts.said, _ = run(again, folder, LATER_STEPS, 1)
        if code != 0 and plan.storage == "faulty":
            facts.refused += 1
            code, facts.said, _ = run(Plan(storage="sound"), folder, LATER_STEPS, 2)
        facts.codes.append(code)
    return facts


def _trial(plan: Plan, folder: Path) -> Judged:
    with small_disk(folder / "storage") if plan.storage == "full" else nullcontext():
        try:
            facts = carry_out(plan, folder)
        except TimeoutError as error:
            return Judged([str(error)], said=(folder / "console.txt").read_text(errors="replace"))
        why, measured = judge(plan, folder, facts)
    return Judged(why, measured, facts.kills, facts.said)


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
        if plan.program != "launcher" and facts.promised != STEPS:
            why.append(f"the run ended with step {facts.promised} on storage, {STEPS} was wanted")
        why += went_on(notes, lambda note: note["run"] > 0, facts.promised, measured)
    for incarnation in range(1, len(plan.kills) + 1):
        promised = min(_newest_sealed(notes[rank], incarnation) for rank in notes)
        last = incarnation == len(plan.kills)
        found = went_on(notes, lambda note, n=incarnation: note["incarnation"] == n, promised, measured)
        why += found if last or measured["resumed"] else []  # else killed before it could say so
    for rank, own in notes.items():
        why += wrong_bytes(rank, own)
    why += other_losses(folder, undisturbed(), LATER_STEPS if plan.storage else STEPS)
    return why, measured


def _newest_sealed(notes: Sequence[dict[str, Any]], before: int) -> int:
    """The newest step that a rank knew to be sealed in incarnations before this one; 0 without."""
    return max(
        (note["step"] for note in notes if note["what"] == "sealed" and note["incarnation"] < before),
        default=0,
    )


CAMPAIGN = Campaign(
    "checkpoint_faults", __doc__, CASES, _trial, undisturbed, "summary.json", "2 ranks, DDP, Gloo"
)
main = CAMPAIGN.main
