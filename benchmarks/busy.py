"""A healthy job with short steps on a busy host: how much keepstep says about it, and what its agent costs.

    python -m benchmarks.busy [--quick] [--json FILE]

Four ranks (eight on 12 cores and more) take steps of about 5 ms and meet in an all-reduce on Gloo, beside as many
programs that compute in bursts as there are cores, for ten minutes (one with ``--quick``). Nothing is wrong with the
job, so what is said of it is noise: lines on the console are counted, less those that begin and end every run. CPU
time is of the agent's process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._report import Line, Report, bench_arguments

RANKS = 8 if (os.cpu_count() or 1) >= 12 else 4
LINES_GOAL = "≤ 3 lines a minute"
AGENT_GOAL = "agent ≤ 2 % of a core"
LINES_A_MINUTE, AGENT_PERCENT = 3.0, 2.0

JOB = """
import random, sys, time
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
until = time.monotonic() + float(sys.argv[1])
gradient, steps = torch.ones(1000), 0
while True:
    time.sleep(0.004)
    going = torch.tensor(float(time.monotonic() < until))
    dist.all_reduce(gradient)
    dist.all_reduce(going, dist.ReduceOp.MIN)
    gradient /= dist.get_world_size()
    steps += 1
    if not going:
        break
if dist.get_rank() == 0:
    print("steps", steps)
dist.destroy_process_group()
"""

BURSTS = """
import random, time

while True:
    until = time.monotonic() + random.uniform(0.01, 0.5)
    while time.monotonic() < until:
        pass
    time.sleep(random.uniform(0.01, 1.0))
"""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def agent_of(launcher: int) -> int | None:
    """The process of the agent among the launcher's children."""
    for task in Path(f"/proc/{launcher}/task").iterdir():
        for child in (task / "children").read_text().split():
            if "keepstep.agent" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    return None


def measured(folder: Path, seconds: float) -> tuple[str, float, int]:
    """The console, the agent's CPU seconds a second, and the number of incidents."""
    script, console = folder / "job.py", folder / "console.txt"
    script.write_text(JOB)
    command = [sys.executable, "-m", "keepstep.cli", "run", "--nproc-per-node", str(RANKS)]
    command += ["--run-dir", str(folder / "run"), str(script), str(seconds)]
    beside = [subprocess.Popen([sys.executable, "-c", BURSTS]) for _ in range(os.cpu_count() or 1)]
    try:
        with console.open("wb") as log:
            launcher = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            time.sleep(20.0)  # imports
            agent = agent_of(launcher.pid)
            if agent is None:
                raise RuntimeError(f"no agent after 20 s: {console.read_text(errors='replace')[-500:]}")
            began_s, before = time.monotonic(), cpu_s(agent)
            time.sleep(max(seconds - 25.0, 5.0))
            used = (cpu_s(agent) - before) / (time.monotonic() - began_s)
            if code := launcher.wait(120.0):
                raise RuntimeError(f"the job ended with {code}: {console.read_text(errors='replace')[-500:]}")
        finally:
            launcher.terminate()
            launcher.wait()
    finally:
        for process in beside:
            process.kill()
            process.wait()
    incidents = len(list((folder / "run" / "incidents").glob("*.json")))
    return console.read_text(errors="replace"), used, incidents


def main() -> None:
    given = bench_arguments("busy", __doc__ or "").parse_args()
    report = Report("busy", quick=given.quick)
    seconds = 60.0 if given.quick else 600.0
    with tempfile.TemporaryDirectory() as folder:
        console, used, incidents = measured(Path(folder), seconds)
    lines = [line for line in console.splitlines() if line.strip()]
    steps = next((int(line.split()[1]) for line in lines if line.startswith("steps ")), 0)
    said = [line for line in lines if not line.startswith("steps ") and "watched, run folder" not in line]
    kinds = sum(line.startswith("SLOW") for line in said)
    peers = {
        "lines": len(said),
        "verdicts": kinds,
        "incidents": incidents,
        "steps": steps,
        "seconds": seconds,
    }
    each = len(said) / seconds * 60
    report.add(Line("lines a minute", round(each, 2), "", LINES_GOAL, each <= LINES_A_MINUTE, peers=peers))
    percent = used * 100
    limit = f"{RANKS} ranks, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    report.add(
        Line("agent", round(percent, 2), "% of a core", AGENT_GOAL, percent <= AGENT_PERCENT, limit=limit)
    )
    print(console)
    report.finish(given.json)


if __name__ == "__main__":
    main()
