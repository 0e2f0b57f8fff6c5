"""From the failure of one of four ranks until all four have made a step again.

    python -m benchmarks.recovery [--quick] [--repetitions N] [--fault kill|exception|stop|sleep] [--json FILE]

keepstep with warm standbys, keepstep without, torchrun; each repetition is a job of its own (small DDP on Gloo, steps
of 25 ms by sleeping, resumed from the state of the last step). The rank is killed (raises an exception, is stopped by
SIGSTOP, sleeps in Python) after 40 steps and, where there are to be standbys, once they are warm. Time is from then to
the end of the last rank's next step. Peers are given 30 s.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks._report import Line, Report, bench_arguments

GOALS = {  # of each fault, in words and in seconds
    "kill": ("≤ 0.8 s", 0.8),
    "exception": ("≤ 0.8 s", 0.8),
    "stop": ("≤ 2 s after the hang budget (1 s for a stopped process)", 3.0),
    "sleep": ("≤ 2 s after the hang budget (30 s before a sleeping process is ended)", 32.0),
}
PEER_PATIENCE_S = 30.0
RANKS = 4
STEP_S = 0.025
STEADY_STEPS = 40
PATIENCE_S = 120.0
JOB = Path(__file__).with_name("_recovery_job.py")
PEERS = ("nvidia-resiliency-ext", "torchft-nightly")


def keepstep(folder: Path, *flags: str) -> list[str]:
    """The command of a run with restarts."""
    command = [sys.executable, "-m", "keepstep.cli", "run", "-v", "--run-dir", str(folder / "run")]
    return [*command, "--max-restarts", "3", "--nproc-per-node", str(RANKS), *flags]


def torchrun(_: Path) -> list[str]:
    """The same with torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--max-restarts",
        "3",
        "--master-port",
        str(port),
    ]
    return [*command, "--nproc-per-node", str(RANKS)]


WAYS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "keepstep, warm standbys": (keepstep, "standbys are warm"),
    "keepstep --standbys 0": (lambda folder: keepstep(folder, "--standbys", "0"), ""),
    "torchrun": (torchrun, ""),
}


def steps(folder: Path, rank: int) -> list[tuple[int, int, float]]:
    """Pid, step and time (CLOCK_MONOTONIC) of every step that the rank has made."""
    try:
        whole = (folder / f"steps-{rank}").read_text().rpartition("\n")[0]
    except OSError:
        return []
    found = [line.split() for line in whole.splitlines()]
    return [(int(pid), int(step), float(at_s)) for pid, step, at_s in found]


def wait(
    process: subprocess.Popen[bytes],
    condition: Callable[[], Any],
    what: str,
    patience_s: float = PATIENCE_S,
) -> Any:
    """What ``condition`` gives, once it is true. Raises TimeoutError or RuntimeError."""
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
        with said.open("wb") as output:
            process = subprocess.Popen(
                [*make(folder), str(JOB), name, str(STEP_S)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                start_new_session=True,
            )
        try:
            wait(process, lambda: all(len(steps(folder, r)) >= STEADY_STEPS for r in range(RANKS)), "steps")
            if ready:
                wait(process, lambda: ready in said.read_text(), ready)
            before = {rank: steps(folder, rank)[-1][0] for rank in range(RANKS)}
            victim = random.Random(seed).randrange(RANKS)
            killed_s = time.monotonic()
            strike(fault, folder, victim, before[victim])

            def again() -> list[float]:
                firsts = [
                    next((at_s for pid, _, at_s in steps(folder, rank) if pid != before[rank]), None)
                    for rank in range(RANKS)
                ]
                return [at_s for at_s in firsts if at_s is not None] if None not in firsts else []

            patience_s = PATIENCE_S if way.startswith("keepstep") else PEER_PATIENCE_S
            return max(wait(process, again, "step after it", patience_s)) - killed_s
        finally:
            (folder / "end").touch()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            _clear(folder)


def repeated(way: str, fault: str, repetitions: int) -> tuple[list[float], list[str]]:
    """Seconds of those that recovered, and what became of those that did not."""
    took: list[float] = []
    failed: list[str] = []
    for seed in range(repetitions):
        try:
            took.append(measure(way, fault, seed))
        except (TimeoutError, RuntimeError) as error:  # noqa: PERF203
            failed.append(str(error))
    return took, failed


def main() -> int:
    """Run the bench."""
    parser: argparse.ArgumentParser = bench_arguments("recovery", __doc__ or "")
    parser.add_argument("--repetitions", type=int, default=5, metavar="N", help="jobs for each way (5)")
    parser.add_argument("--fault", action="append", choices=GOALS, help="default: kill, exception and stop")
    given = parser.parse_args()
    repetitions = 1 if given.quick else given.repetitions
    report = Report("recovery", packages=("torch", "keepstep"), quick=given.quick)
    for fault in given.fault or ("kill", "exception", "stop"):
        _measure_all(fault, repetitions, report)
    report.finish(given.json)
    return 0


def _measure_all(fault: str, repetitions: int, report: Report) -> None:
    # torchrun notices a stopped or sleeping rank when a collective runs out of time: after half an hour
    ways = [way for way in WAYS if fault in ("kill", "exception") or way.startswith("keepstep, ")]
    results = {way: repeated(way, fault, repetitions) for way in ways}
    peers: dict[str, float | int | str] = {}
    for way in ways[1:]:
        took = results[way][0]
        peers[way] = round(statistics.median(took), 2) if took else "did not recover"
    for package in PEERS:
        peers[package] = version(package)
    goal, goal_s = GOALS[fault]
    for way, (took, failed) in results.items():
        ours = way == ways[0]
        median_s = round(statistics.median(took), 3) if took else None
        spread = f"{min(took):.2f} to {max(took):.2f} s" if took else "-"
        lost = f"; {len(failed)} of {repetitions} did not recover: {failed[0]}" if failed else ""
        report.add(
            Line(
                f"{fault} to the next step of all, {way}, median of {len(took)} ({spread})",
                median_s,
                "s",
                goal=goal if ours else None,
                met=(not failed and median_s is not None and median_s <= goal_s) if ours else None,
                peers=peers if ours else {},
                limit="Gloo on one machine, a small model; steps emulated by sleeping" + lost,
            )
        )


def version(package: str) -> str:
    """Whether a peer could be measured."""
    try:
        return f"{metadata.version(package)} is installed, not driven yet"
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
