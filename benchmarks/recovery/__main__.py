"""From the failure of one of four ranks (or more) until all have made a step again.

    python -m benchmarks.recovery [--quick] [--repetitions N] [--others N] [--fault kill|exception|stop|sleep]
        [--ranks 4] [--state-mb 0] [--json FILE]

keepstep with warm standbys for all ranks, keepstep in place (a session: only the rank that failed is replaced, by its
standby), keepstep without standbys, torchrun (with a store for each incarnation, and with its default settings) and,
where installed, nvidia-resiliency-ext (in-process, one rank in reserve) and torchft; each repetition is a job of its
own (small DDP on Gloo, steps of 25 ms, or of 100 ms for more than 8 ranks, by sleeping, resumed from the state of the
last step). The rank is killed (raises an exception, is stopped by SIGSTOP, sleeps in Python) after 40 steps and, where
there are to be standbys, once they are warm. Time is from then until all ranks have made a step together again:
torchft's survivors go on by themselves before that. Peers are given 30 s.

With ``--json FILE.json`` each result is written at once, to FILE-trials.jsonl; the same command, given again at the
same commit of the code, goes on where it was ended.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from benchmarks._report import Line, Report, bench_arguments, code_commit
from benchmarks.recovery.peers import free_port
from benchmarks.recovery.victim import ballast_bytes, ranks

GOALS = {  # of each fault, in words and in seconds
    "kill": ("≤ 0.8 s", 0.8),
    "exception": ("≤ 0.8 s", 0.8),
    "stop": ("≤ 2 s after the hang budget (1 s for a stopped process)", 3.0),
    "sleep": ("≤ 2 s after the hang budget (30 s before a sleeping process is ended)", 32.0),
}
PEER_PATIENCE_S = 30.0
STEP_S = 0.025
STEADY_STEPS = 40
FEW_STEADY_STEPS = 8  # where a step copies a large state
PATIENCE_S = 120.0
JOB = Path(__file__).with_name("job.py")
SESSION_JOB = Path(__file__).with_name("session_job.py")
OURS = ("keepstep, warm standbys", "keepstep, in place")
PACKAGES = {
    "nvidia-resiliency-ext": "nvidia-resiliency-ext",
    "torchft": "torchft-nightly",
}  # of ways that need one


def step_s() -> float:
    """What a step sleeps for: with many ranks longer, or they leave no CPU time for standbys to be made in."""
    return STEP_S if ranks() <= 8 else 4 * STEP_S


PATIENCE = ("--hang-patience", "30", "--stopped-patience", "1")


def keepstep(folder: Path, *flags: str, job: Path = JOB) -> list[str]:
    """The command of a run with restarts."""
    command = [sys.executable, "-m", "keepstep.cli", "run", "-v", "--run-dir", str(folder / "run")]
    command += ["--max-restarts", "3", "--on-hang", "restart", *PATIENCE]
    command += ["--nproc-per-node", str(ranks()), *flags]
    return [*command, str(job), str(folder), str(step_s())]


def torchrun(folder: Path) -> list[str]:
    """The same with torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3"]
    command += ["--master-port", str(free_port()), "--nproc-per-node", str(ranks())]
    return [*command, str(JOB), str(folder), str(step_s())]


def peer(name: str, folder: Path) -> list[str]:
    """Another product's."""
    return [sys.executable, "-m", "benchmarks.recovery.peers", name, str(folder), str(step_s())]


WAYS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "keepstep, warm standbys": (keepstep, "standbys are warm"),
    "keepstep, in place": (
        lambda folder: keepstep(folder, "--in-place", job=SESSION_JOB),
        "standbys are warm",
    ),
    "keepstep --standbys 0": (lambda folder: keepstep(folder, "--standbys", "0"), ""),
    "torchrun": (torchrun, ""),
    "torchrun, default settings": (
        lambda folder: ["env", "-u", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", *torchrun(folder)],
        "",
    ),
    **{name: (partial(peer, name), "") for name in PACKAGES},
}


class Step(NamedTuple):
    """One that a rank has made; ``epoch`` is another one after the job has been formed anew."""

    pid: int
    epoch: int
    world: int
    step: int
    at_s: float  # CLOCK_MONOTONIC


def steps(folder: Path, rank: int) -> list[Step]:
    """All that the rank has made."""
    try:
        whole = (folder / f"steps-{rank}").read_text().rpartition("\n")[0]
    except OSError:
        return []
    lines = [line.split() for line in whole.splitlines()]
    return [
        Step(int(pid), int(epoch), int(world), int(step), float(at_s))
        for pid, epoch, world, step, at_s in lines
    ]


def wait(
    process: subprocess.Popen[bytes],
    condition: Callable[[], Any],
    what: str,
    patience_s: float | None = None,
) -> Any:
    """What ``condition`` gives, once it is true. Raises TimeoutError or RuntimeError."""
    patience_s = patience_s or PATIENCE_S * max(1, ranks() // 4)
    deadline_s = time.monotonic() + patience_s
    while not (found := condition()):
        if process.poll() is not None:
            raise RuntimeError(f"the job ended with {process.returncode} before {what}")
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"no {what} within {patience_s:.0f} s")
        time.sleep(0.01)
    return found


def strike(fault: str, folder: Path, rank: int, pid: int) -> None:
    """Have a rank fail."""
    if fault in ("kill", "stop"):
        os.kill(pid, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    else:
        (folder / f"{fault}-{rank}").touch()


def _clear(folder: Path) -> None:
    """What a launcher that failed has left: workers, in sessions of their own, and their states on tmpfs."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(folder) in process.cmdline():
                process.kill()
    for state in Path("/dev/shm").glob(f"{folder.name}-*"):
        state.unlink(missing_ok=True)


def measure(way: str, fault: str, seed: int) -> float:
    """Seconds of one recovery."""
    make, ready = WAYS[way]
    with tempfile.TemporaryDirectory(prefix="keepstep-recovery-") as name:
        folder, said = Path(name), Path(name) / "said"
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environ["PYTHONPATH"] = str(JOB.parents[1])  # jobs are started by their path
        with said.open("wb") as output:
            process = subprocess.Popen(
                make(folder),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
            )
        try:
            wait(process, lambda: _steady(folder), "steps")
            if ready:
                wait(process, lambda: ready in said.read_text(), ready)
            before = {rank: steps(folder, rank)[-1] for rank in range(ranks())}
            victim = random.Random(seed).randrange(ranks())
            struck_s = time.monotonic()
            strike(fault, folder, victim, before[victim].pid)

            def again() -> list[float]:
                firsts = [
                    next(
                        (
                            one.at_s
                            for one in steps(folder, rank)
                            if one.world == ranks() and one.epoch > was.epoch
                        ),
                        0.0,
                    )
                    for rank, was in before.items()
                ]
                return firsts if all(firsts) else []

            patience_s = PATIENCE_S if way.startswith("keepstep") else PEER_PATIENCE_S
            return max(wait(process, again, "step after it", patience_s)) - struck_s
        finally:
            (folder / "end").touch()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            _clear(folder)


def _steady(folder: Path) -> bool:
    """Whether all ranks have made enough steps together."""
    wanted = FEW_STEADY_STEPS if ballast_bytes() else STEADY_STEPS
    return all(sum(one.world == ranks() for one in steps(folder, rank)) >= wanted for rank in range(ranks()))


def copy_s() -> float:
    """Seconds in which all ranks' ballast is copied once to new memory, all at the same time; the median of three."""
    if not ballast_bytes():
        return 0.0
    torch.set_num_threads(1)
    source = torch.ones(ballast_bytes() // 4)
    took: list[float] = []
    for _ in range(3):
        targets = [torch.empty_like(source) for _ in range(ranks())]
        began_s = time.monotonic()
        with ThreadPoolExecutor(ranks()) as pool:
            list(pool.map(lambda target: target.copy_(source), targets))
        took.append(time.monotonic() - began_s)
    return statistics.median(took)


def main() -> int:
    """Run the bench."""
    parser: argparse.ArgumentParser = bench_arguments("recovery", __doc__ or "")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="jobs for each way (5)")
    parser.add_argument(
        "--others", type=int, metavar="N", help="jobs for each way but keepstep's (as many as --repetitions)"
    )
    parser.add_argument("--fault", action="append", choices=GOALS, help="default: kill, exception and stop")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="of the job (4)")
    parser.add_argument(
        "--state-mb", type=int, default=0, metavar="MB", help="of each rank, beside the model (0)"
    )
    given = parser.parse_args()
    os.environ |= {"RECOVERY_RANKS": str(given.ranks), "RECOVERY_BALLAST": str(given.state_mb << 20)}
    repetitions = 1 if given.quick else given.repetitions
    others = repetitions if given.others is None else min(given.others, repetitions)
    packages = ("torch", "keepstep", *PACKAGES.values())
    report = Report("recovery", packages=packages, quick=given.quick)
    trials = Trials(given.json and given.json.with_name(f"{given.json.stem}-trials.jsonl"))
    for fault in given.fault or ("kill", "exception", "stop"):
        _measure_all(fault, repetitions, others, report, trials)
    report.finish(given.json)
    return 0


class Trials:
    """The result of each job: kept in a file, where one is given, and not measured again."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._same = {
            "commit": code_commit(),
            "ranks": ranks(),
            "state_mb": ballast_bytes() >> 20,
        }
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        known: list[dict[str, Any]] = [json.loads(line) for line in lines]
        same = self._same.items()
        self._known = {(one["fault"], one["way"], one["seed"]): one for one in known if same <= one.items()}

    def result(self, fault: str, way: str, seed: int) -> tuple[float | None, str]:
        """Seconds that it took, or why it did not recover."""
        found = self._known.get((fault, way, seed))
        if found is None:
            found = {**self._same, "fault": fault, "way": way, "seed": seed, "took_s": None, "failed": ""}
            try:
                found["took_s"] = round(measure(way, fault, seed), 4)
            except (TimeoutError, RuntimeError) as error:
                found["failed"] = str(error)
            print(f"{fault} {seed}: {way}: {found['took_s'] or found['failed']}", file=sys.stderr, flush=True)
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write(json.dumps(found) + "\n")
        return found["took_s"], found["failed"]


def _measure_all(fault: str, repetitions: int, others: int, report: Report, trials: Trials) -> None:
    missing = {way for way, package in PACKAGES.items() if not _is_installed(package)}
    ways = [way for way in WAYS if way not in missing]
    if fault not in ("kill", "exception"):
        # torchrun notices a stopped or sleeping rank when a collective runs out of time: after half an hour
        ways = [
            way
            for way in ways
            if way not in ("keepstep --standbys 0", "torchrun", "torchrun, default settings")
        ]
    results: dict[str, tuple[list[float], list[str]]] = {way: ([], []) for way in ways}
    for seed in range(repetitions):  # in turn: what the machine does beside is everybody's
        for way, (took, failed) in results.items():
            if way not in OURS and seed >= others:
                continue
            took_s, why = trials.result(fault, way, seed)
            if took_s is None:
                failed.append(why)
            else:
                took.append(took_s)
    copy = copy_s()
    peers: dict[str, float | int | str] = dict.fromkeys(sorted(missing), "not installed")
    for way in (way for way in ways if way not in OURS):
        took = results[way][0]
        peers[way] = (
            round(statistics.median(took), 2) if took else "did not recover" if others else "not measured"
        )
    goal, goal_s = GOALS[fault]
    limit = (
        f"{ranks()} ranks, Gloo on one machine, a small model; steps of {1000 * step_s():.0f} ms by sleeping"
    )
    if copy:
        limit += f"; {ballast_bytes() >> 20} MB of state a rank, all of which are copied in {copy:.2f} s"
        goal += " (plus bytes ÷ measured bandwidth)"
    for way, (took, failed) in results.items():
        if not took and not failed:
            continue
        ours = way in OURS
        median_s = round(statistics.median(took), 3) if took else None
        spread = f"{min(took):.2f} to {max(took):.2f} s" if took else "-"
        lost = f"; {len(failed)} of {len(took) + len(failed)} did not recover: {failed[0]}" if failed else ""
        report.add(
            Line(
                f"{fault} to the next step of all, {way}, median of {len(took)} ({spread})",
                median_s,
                "s",
                goal=goal if ours else None,
                met=(not failed and median_s is not None and median_s <= goal_s + copy) if ours else None,
                peers=peers if ours else {},
                limit=limit + lost,
            )
        )


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
