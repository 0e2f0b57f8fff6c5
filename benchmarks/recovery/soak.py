"""One long training under random faults: it ends with the losses of an undisturbed one, and says what each fault cost.

    python -m benchmarks.recovery.soak [--faults 200] [--steps 2000] [--ranks 8] [--reference] [--seed N] [--json FILE]

A session on one node (DDP over Gloo, emulating nothing but a pause after each step). At steps drawn beforehand a rank,
or two at once, are killed, raise an exception, are stopped or sleep for good; a rank is killed while it restores; the
agent or the controller is killed. Seconds are from the fault until all ranks have made a step in a later incarnation
(for agent and controller, which training does not wait for: until there is a new one). A rank goes to sleep only after
some steps of an incarnation: the first ones are given ten minutes. ``--reference``: every process
is replaced by a standby; without it, those that did not fail go on in place.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks.campaign.trial import processes_of
from benchmarks.checkpoint_faults.campaign import ROOT, losses, moment
from benchmarks.checkpoint_faults.job import Marks, Phase

JOB = Path(__file__).with_name("soak_job.py")
PAUSE_S = 0.05
GOAL = "200 random faults over one run of 2,000 steps on 8 ranks end with the right final loss"
PATIENCE_S = 240.0  # for one recovery
_STEADY_STEPS = 4
_PROGRAMS = {"agent": "keepstep.agent", "controller": "keepstep.control"}
_KINDS = {  # and how often of 100
    "kill": 40,
    "kill of two": 10,
    "kill while restoring": 8,
    "exception": 18,
    "stop": 10,
    "sleep": 2,
    "agent": 6,
    "controller": 6,
}


@dataclass(frozen=True)
class Fault:
    """At ``step``, ``after_s`` after the first of ``ranks`` has come to ``phase``."""

    kind: str
    step: int
    ranks: tuple[int, ...]
    phase: Phase
    after_s: float


@dataclass
class Struck:
    """A fault as it went. ``lost_steps``: made and made again; ``again_s`` None: nothing to wait for was lost."""

    fault: Fault
    at_step: int
    again_s: float | None
    lost_steps: int


def drawn(seed: int, count: int, steps: int, ranks: int) -> list[Fault]:
    """What happens, in the order of the steps."""
    chances = random.Random(f"soak:{seed}")
    at = sorted(chances.sample(range(5, steps - 5), count))
    kinds = chances.choices(list(_KINDS), list(_KINDS.values()), k=count)
    return [
        Fault(
            kind,
            step,
            tuple(chances.sample(range(ranks), 2 if kind == "kill of two" else 1)),
            chances.choice((Phase.TRAIN, Phase.STEP, Phase.SAVE)),
            moment(chances),
        )
        for step, kind in zip(at, kinds, strict=True)
    ]


class Soak:
    """The run while it lasts."""

    def __init__(self, folder: Path, ranks: int, steps: int, flags: list[str], seed: int) -> None:
        self.folder, self.ranks, self.steps = folder, ranks, steps
        self._seed = seed
        self.mark = Marks(folder).get  # process, phase and step of a rank; zeros before there is any
        self._made: dict[int, list[tuple[int, int, float]]] = {rank: [] for rank in range(ranks)}
        self._read = dict.fromkeys(range(ranks), 0)  # bytes of steps-R
        self.process = _start(folder, ranks, steps, PAUSE_S, flags)

    def wait(self, condition: Callable[[], Any], what: str, pause_s: float = 0.02) -> None:
        """Until it is true.

        Raises:
            RuntimeError: it does not come, or the job has ended.
        """
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"the job ended with {self.process.returncode} before {what}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"no {what} within {PATIENCE_S:g} s; ranks at {self._where()}")
            time.sleep(pause_s)

    def _where(self) -> list[tuple[int, int, int]]:
        return [self.mark(rank) for rank in range(self.ranks)]

    def made(self, rank: int) -> list[tuple[int, int, float]]:
        """Incarnation, step and time of all steps that a rank has made."""
        with suppress(OSError), (self.folder / f"steps-{rank}").open("rb") as file:
            file.seek(self._read[rank])
            whole = file.read().rpartition(b"\n")[0]
            self._read[rank] += len(whole) + bool(whole)
            for line in whole.splitlines():
                _, incarnation, step, at_s = line.split()
                self._made[rank].append((int(incarnation), int(step), float(at_s)))
        return self._made[rank]

    def strike(self, fault: Fault) -> Struck:
        """Wait for its moment, do it, and wait until all ranks train again."""
        first = fault.ranks[0]
        self.wait(
            lambda: self.mark(first)[1] != Phase.RESTORE and self.mark(first)[2] >= fault.step, "its step"
        )
        if fault.kind == "sleep":
            self.wait(lambda: all(self._is_steady(rank) for rank in range(self.ranks)), "steady steps")
        self.wait(lambda: self.mark(first)[1] == fault.phase, "its phase", 5e-4)
        end_s = time.monotonic() + fault.after_s
        while time.monotonic() < end_s:
            pass
        if fault.kind in _PROGRAMS:
            return self._end_program(fault)
        last = [row for rank in range(self.ranks) for row in self.made(rank)[-1:]]
        incarnation = max((row[0] for row in last), default=0)
        newest = max((row[1] for row in last), default=-1)
        struck_s = self._act(fault, incarnation)

        def firsts() -> list[tuple[int, int, float]]:
            found = [self._first_after(rank, incarnation) for rank in range(self.ranks)]
            return [row for row in found if row]

        self.wait(lambda: len(firsts()) == self.ranks, f"step after {fault.kind}")
        began = min(step for _, step, _ in firsts())
        again_s = max(at for _, _, at in firsts()) - struck_s
        return Struck(fault, newest, round(again_s, 3), max(0, newest + 1 - began))

    def _first_after(self, rank: int, incarnation: int) -> tuple[int, int, float] | None:
        later = None
        for row in reversed(self.made(rank)):
            if row[0] <= incarnation:
                break
            later = row
        return later

    def _is_steady(self, rank: int) -> bool:
        """Whether it has made more steps since the job began anew than may take minutes (to import, to compile)."""
        made = self.made(rank)
        return sum(row[0] == made[-1][0] for row in made[-_STEADY_STEPS:]) == _STEADY_STEPS if made else False

    def _act(self, fault: Fault, incarnation: int) -> float:
        if fault.kind == "kill while restoring":
            struck_s = time.monotonic()
            self._kill(fault.ranks[0], signal.SIGKILL)
            other = (fault.ranks[0] + 1) % self.ranks
            self.wait(
                lambda: (
                    self.mark(other)[1:] == (Phase.RESTORE, incarnation + 1)
                    or self._is_past(other, incarnation)
                ),
                "restore",
                5e-4,
            )
            self._kill(other, signal.SIGKILL)
            return struck_s
        for rank in fault.ranks:
            if fault.kind in ("exception", "sleep"):
                (self.folder / f"{fault.kind}-{rank}").touch()
            else:
                self._kill(rank, signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
        return time.monotonic()

    def _is_past(self, rank: int, incarnation: int) -> bool:
        return self._first_after(rank, incarnation) is not None

    def _kill(self, rank: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.mark(rank)[0], number)

    def _end_program(self, fault: Fault) -> Struck:
        def running() -> set[int]:
            of_run = processes_of(self.folder / "run").items()
            return {pid for pid, line in of_run if _PROGRAMS[fault.kind] in line}

        at_step = self.mark(0)[2]
        self.wait(running, f"{fault.kind}")
        old, struck_s = running(), time.monotonic()
        for pid in old:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait(lambda: running() - old, f"new {fault.kind}")
        return Struck(fault, at_step, round(time.monotonic() - struck_s, 3), 0)


def _start(folder: Path, ranks: int, steps: int, pause_s: float, flags: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run")]
    command += ["--nproc-per-node", str(ranks), *flags, str(JOB), str(folder), str(steps), str(pause_s)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "console.txt").open("ab") as console:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            start_new_session=True,
        )


def undisturbed(ranks: int, steps: int) -> dict[int, dict[int, set[str]]]:
    """The losses of a training that nothing happens to, by rank."""
    with tempfile.TemporaryDirectory() as name:
        code = _start(Path(name), ranks, steps, 0.0, ["--no-watch"]).wait()
        if code != 0:
            raise RuntimeError(f"the undisturbed training ended with {code}")
        return {rank: losses(Path(name), rank) for rank in range(ranks)}


def soak(
    faults: list[Fault], ranks: int, steps: int, flags: list[str], seed: int
) -> tuple[list[Struck], list[str]]:
    """What each fault cost, and what is wrong with the run, a line each."""
    expected = undisturbed(ranks, steps)
    struck: list[Struck] = []
    why: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = Soak(folder, ranks, steps, flags, seed)
        try:
            for number, fault in enumerate(faults):
                struck.append(run.strike(fault))
                one = struck[-1]
                print(f"{number + 1}: {fault.kind} at step {one.at_step}: {one.again_s} s", flush=True)
            code = run.process.wait(PATIENCE_S + steps * (PAUSE_S + 0.2))
            if code != 0:
                why.append(f"the job ended with {code}")
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            why.append(f"after {len(struck)} faults: {error}")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()
        for rank, of_rank in expected.items():
            found = losses(folder, rank)
            if len(found) != steps or any(found[step] != of_rank[step] for step in found):
                why.append(f"rank {rank}: its losses are not those of the undisturbed training")
        if why:
            kept = ROOT / "runs" / f"recovery-soak-{seed}-console.txt"
            kept.parent.mkdir(exist_ok=True)
            kept.write_bytes((folder / "console.txt").read_bytes())
    return struck, why


def _lines(struck: list[Struck], why: list[str], faults: int, limit: str) -> Iterator[Line]:
    ended = "the losses of an undisturbed run, bit by bit" if not why else "; ".join(why)
    yield Line(
        f"{len(struck)} of {faults} faults", ended, "", GOAL, not why and len(struck) == faults, limit=limit
    )
    for kind in _KINDS:
        took = [one.again_s for one in struck if one.fault.kind == kind and one.again_s is not None]
        if took:
            lost = max(one.lost_steps for one in struck if one.fault.kind == kind)
            spread = f"{min(took):.2f} to {max(took):.2f} s; at most {lost} steps made again"
            yield Line(
                f"{kind}, median of {len(took)} ({spread})",
                round(statistics.median(took), 3),
                "s",
                limit=limit,
            )


def main() -> int:
    """Run the soak."""
    parser: argparse.ArgumentParser = bench_arguments("recovery.soak", __doc__ or "")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reference", action="store_true", help="every process is replaced by a standby")
    given = parser.parse_args()
    count, steps = (5, 60) if given.quick else (given.faults, given.steps)
    ranks = 2 if given.quick else given.ranks
    flags = ["-v", "--max-restarts", str(3 * count), "--on-hang", "restart", "--no-validate"]
    flags += ["--hang-patience", "30", "--stopped-patience", "1"]
    flags += ["--restart-budget", "rank=0,node=0,hour=0,same=0", *([] if given.reference else ["--in-place"])]
    report = Report("recovery_soak", packages=("torch", "keepstep"), quick=given.quick)
    struck, why = soak(drawn(given.seed, count, steps, ranks), ranks, steps, flags, given.seed)
    how = "every process replaced" if given.reference else "in place"
    limit = (
        f"{ranks} ranks on one machine, Gloo, a small model, a pause of {PAUSE_S * 1000:.0f} ms a step; {how}"
    )
    for line in _lines(struck, why, count, limit):
        report.add(line)
    if given.json:
        rows = "".join(json.dumps(asdict(one)) + "\n" for one in struck)
        given.json.with_name(given.json.stem + "-faults.jsonl").write_text(rows)
    report.finish(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
