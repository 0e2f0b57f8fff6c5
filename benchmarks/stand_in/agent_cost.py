"""What the agent costs on a node with eight ranks of many operations each.

    python -m benchmarks.stand_in.agent_cost [--quick] [--job NAME] [--ranks N] [--calls N] [--pace N]
        [--lines N] [--json FILE]

CPU time of the agent's whole process, from 20 s after the ranks' first step on. ``make cuda`` first. Jobs: ``written``,
whose ranks only write rings, as two cores cannot carry eight ranks of torch at this pace; ``called``, with real calls
of torch and NCCL on the stand-in GPU, which falls short of the pace where cores are few.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from pathlib import Path

from benchmarks._report import Line, Report, bench_arguments
from benchmarks.busy import agent_of, cpu_s
from benchmarks.stand_in.launch import Job, start

_FOLDER = Path(__file__).with_name("jobs")
JOBS = {"written": _FOLDER / "written_calls.py", "called": _FOLDER / "many_calls.py"}
GOAL, PERCENT = "≤ 2 % of a core at 8 ranks × 500 operations × 5 steps/s", 2.0
_SETTLES_S, _BEGINS_S = 20.0, 120.0


def agent_share(job: Job, launcher: int, seconds: float) -> float:
    """CPU seconds a second of the agent, from the ranks' first steps on."""
    until = time.monotonic() + _BEGINS_S
    iterations = job.folder / "run" / "nodes" / "0" / "iterations.jsonl"
    while not iterations.exists() or not iterations.stat().st_size:
        if time.monotonic() > until or job.is_over():
            raise RuntimeError(f"the job did not begin: {job.console()[-500:]}")
        time.sleep(0.2)
    time.sleep(_SETTLES_S)
    agent = agent_of(launcher)
    if agent is None:
        raise RuntimeError(f"there is no agent: {job.console()[-500:]}")
    began_s, before = time.monotonic(), cpu_s(agent)
    time.sleep(seconds)
    return (cpu_s(agent) - before) / (time.monotonic() - began_s)


def main() -> None:
    parser = bench_arguments("stand_in.agent_cost", "What the agent costs beside ranks of many operations.")
    parser.add_argument("--job", choices=tuple(JOBS), default="written")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--calls", type=int, default=500, help="operations a step")
    parser.add_argument("--pace", type=float, default=5.0, help="steps a second")
    parser.add_argument("--lines", type=int, default=0, help="lines that the ranks of 'written' log a second")
    arguments = parser.parse_args()
    if arguments.lines and arguments.job != "written":
        parser.error("--lines: only the job 'written' logs lines")
    seconds = 20.0 if arguments.quick else 120.0
    words = [str(seconds + 2 * _SETTLES_S), str(arguments.calls), str(arguments.pace)]
    if arguments.lines:
        words.append(str(arguments.lines / arguments.ranks))
    report = Report("agent on the stand-in", quick=arguments.quick)
    with (  # cleaning up may fail: the agent may still be saving rings
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        start(
            JOBS[arguments.job], words, Path(folder), ranks=arguments.ranks, clock="virtual", kernel_us=5
        ) as job,
    ):
        share = 100 * agent_share(job, job.launcher, seconds)
        done = job.finish(seconds + _BEGINS_S)
    told = re.search(r"pace ([\d.]+) steps", done.console)
    pace = float(told[1]) if told else 0.0
    stand_in = "rings written by a script" if arguments.job == "written" else "a stand-in for the GPU"
    limit = f"{stand_in}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    named = f"{arguments.ranks} ranks × {arguments.calls} operations, {arguments.job}"
    named += f", {arguments.lines:,} lines a second" if arguments.lines else ""
    report.add(Line(f"steps a second, {named}", pace, "", limit=limit))
    met = share <= PERCENT and pace >= 0.95 * arguments.pace
    report.add(Line(f"agent, {named}", round(share, 2), "% of a core", GOAL, met, limit=limit))
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
