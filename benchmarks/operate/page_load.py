"""What those who look at a job of 131,072 ranks cost its controller.

    python -m benchmarks.operate.page_load

The controller is the shipped program against the stand-in agents of ``benchmarks.controller``: 16,384 nodes with a
heartbeat of 8 ranks a second each, on loopback. Its CPU time is taken while nobody looks and while a viewer, a process
of its own, asks every two seconds, by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

from benchmarks._report import Line, Report
from benchmarks.controller import RANKS, beat_for, connect_all, heartbeat, start_controller
from keepstep import wire
from keepstep.core.errors import RunError
from keepstep.traces import Run
from keepstep.view.follower import Follower

AGENTS = 16_384
MOST_POINTS = 5.0  # of a core that looking may add
_EVERY_S = 2.0
_TURNS = 3


def view(run: Path) -> None:
    """Follow a run until SIGTERM; then print how many answers came, how long each took, and CPU time of one."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    follower, took_s, ranks = Follower(Run(run)), list[float](), 0
    began_cpu_s = time.process_time()
    while not stopped:
        began_s = time.monotonic()
        with suppress(RunError):  # the machine is too busy
            ranks = len(follower.ask().ranks)
            took_s.append(time.monotonic() - began_s)
        while not stopped and time.monotonic() < began_s + _EVERY_S:
            time.sleep(0.02)
    cpu_s = (time.process_time() - began_cpu_s) / max(len(took_s), 1)
    print(json.dumps({"answers": len(took_s), "s": median(took_s or [0.0]), "cpu_s": cpu_s, "ranks": ranks}))


async def _shares(
    run: Path, agents: int, every_s: int, seconds: float
) -> tuple[list[float], list[float], dict[str, float]]:
    """Percent of a core that the controller takes, without and with a viewer; and what the last viewer says."""
    key = wire.RunKey(wire.write_secret(run / "secret"))
    process, port = start_controller(run, run / "secret")
    described = {"controller": f"127.0.0.1:{port}", "secret_file": str(run / "secret")}
    (run / "run.json").write_text(json.dumps(described))
    watched = psutil.Process(process.pid)
    alone: list[float] = []
    looked: list[float] = []
    told: dict[str, float] = {}
    try:
        stand_ins = await connect_all(agents, port, key)
        now_s = time.monotonic()
        bodies = [wire.encode(heartbeat(node, 60, now_s, 4)) for node in range(agents)]

        async def beat(seconds: float) -> None:
            for second in range(int(seconds)):
                some = slice(second % every_s, None, every_s)
                await beat_for(stand_ins[some], bodies[some], 1)

        async def share() -> float:
            before, began_s = sum(watched.cpu_times()[:2]), time.monotonic()
            await beat(seconds)
            return 100 * (sum(watched.cpu_times()[:2]) - before) / (time.monotonic() - began_s)

        await beat(3 + every_s)
        for _ in range(_TURNS):
            alone.append(await share())
            viewer = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.operate.page_load", "--view", str(run)],
                stdout=subprocess.PIPE,
                text=True,
            )
            await beat(3)
            looked.append(await share())
            viewer.terminate()
            said, _ = await asyncio.to_thread(viewer.communicate)
            told = json.loads(said)
        for one in stand_ins:
            one.transport.abort()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    print((run / "stderr.txt").read_text(), file=sys.stderr, end="")
    return alone, looked, told


def add_controllers_share(
    report: Report, agents: int = AGENTS, every_s: int = 1, seconds: float = 15.0
) -> None:
    """Add what looking costs the controller, to turns of so many ``seconds``."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    agents = min(agents, hard - 200)
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
        os.chmod(folder, 0o700)
        alone, looked, told = wire.run(_shares(Path(folder), agents, every_s, seconds))
    more = median(looked) - median(alone)
    shape = f"{agents} stand-in agents, {agents * RANKS} ranks, heartbeats every {every_s} s, {_TURNS} turns"
    goal = f"at most {MOST_POINTS:g} points of a core" if agents >= AGENTS else None
    each = ", ".join(f"{one:.1f}" for one in looked)
    lone = ", ".join(f"{one:.1f}" for one in alone)
    report.add(Line("controller, nobody looks", round(median(alone), 1), "% of a core", limit=lone))
    report.add(
        Line(
            "controller, a viewer asks every 2 s",
            round(more, 1),
            "points more",
            goal,
            more <= MOST_POINTS if goal else None,
            limit=f"{each} % of a core",
        )
    )
    report.add(
        Line("an answer comes after", round(told["s"], 2), "s", limit=f"{told['answers']} answers; {shape}")
    )
    report.add(
        Line("viewer's CPU for an answer", round(told["cpu_s"], 3), "s", limit=f"{told['ranks']} ranks")
    )


def main(argv: list[str] | None = None) -> None:
    """Measure and print; or be the viewer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    text = "seconds between two heartbeats of one agent; more where this machine cannot keep up"
    parser.add_argument("--every", type=int, default=1, metavar="SECONDS", help=text)
    parser.add_argument("--view", type=Path, metavar="RUN", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON to FILE")
    given = parser.parse_args(argv)
    if given.view is not None:
        view(given.view)
        return
    report = Report("page load", quick=False, packages=("keepstep", "msgspec", "numpy", "uvloop"))
    add_controllers_share(report, given.agents, given.every, given.seconds)
    report.finish(given.json)


if __name__ == "__main__":
    main()
