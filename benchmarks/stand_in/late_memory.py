"""A device that is nearly full and frees a dead process's memory late: does the next worker find enough?

    python -m benchmarks.stand_in.late_memory [--seeds N] [--json FILE]

Each seed draws a layout, who is killed, when, and whether standbys are warm. The workers of the next incarnation need
three quarters of the device, and what the dead had of it is free 5 s after their death. ``make cuda`` first. With FILE,
the trials are kept beside it (``FILE-trials.jsonl``).
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks._trials import Trials
from benchmarks.stand_in.faults import PHASES, Fault
from benchmarks.stand_in.launch import TRAIN, run

STEPS = 30
FREED_AFTER_S = 5.0
WAITS = re.compile(r"GB of .* that ended .* not free yet: .* wait")
_RESTART = re.compile(r"; restart (\d+) of")
_ENDED = re.compile(r"training again [\d.]+ s after .*\n?.*\(ended ([\d.]+)")


def trial(seed: int, folder: Path) -> dict[str, Any]:
    """One job; what was drawn and what came of it."""
    draw = random.Random(seed)
    layout, standbys = draw.choice(("ddp", "fsdp2")), draw.choice(("auto", "0"))
    rank, step, where = draw.randrange(2), draw.randrange(2, STEPS - 5), draw.choice(PHASES)
    done = run(
        TRAIN,
        ["--layout", layout, "--steps", str(STEPS), "--memory-gb", "0.75", "--pace-s", "0.1"],
        folder,
        ranks=2,
        flags=["--max-restarts", "3", "--standbys", standbys],
        faults=[Fault("die", rank=rank, step=step, where=where)],
        nvml=True,
        settings={"STAND_IN_MEMORY_GB": "1", "STAND_IN_FREED_AFTER_MS": str(int(1000 * FREED_AFTER_S))},
        timeout_s=240,
    )
    ended = _ENDED.search(done.console)
    outcome = {
        "exit_code": done.exit_code,
        "restarts": max(map(int, _RESTART.findall(done.console)), default=0),
        "out_of_memory": "OutOfMemory" in done.console,
        "said": len(WAITS.findall(done.console)),
        "ended_s": float(ended[1]) if ended else None,
        "all_steps": all(set(device.marks) == set(range(STEPS)) for device in done.devices),
    }
    right = (0, 1, False, 1, True)
    of = ("exit_code", "restarts", "out_of_memory", "said", "all_steps")
    passed = tuple(outcome[name] for name in of) == right
    drawn = {"layout": layout, "standbys": standbys, "rank": rank, "step": step, "where": where}
    return {**drawn, **outcome, "failed": "" if passed else done.console[-3000:]}


def judged(trials: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The figures of these trials."""
    passed = sum(not one["failed"] for one in trials)
    vain = sum(max(one.get("restarts", 0) - 1, 0) for one in trials)
    limit = "a stand-in for the GPU, which frees late by order"
    return [
        Line(
            "one restart, and it trains",
            f"{passed} of {len(trials)}",
            "",
            "all",
            passed == len(trials),
            limit=limit,
        ),
        Line("restarts in vain", vain, "", "0", vain == 0),
    ]


def main() -> None:
    parser = bench_arguments("stand_in.late_memory", "A device that frees a dead process's memory late.")
    parser.add_argument("--seeds", type=int, default=10)
    arguments = parser.parse_args()
    report = Report("late memory on the stand-in", quick=arguments.quick)
    kept = Trials(arguments.json and arguments.json.with_name(f"{arguments.json.stem}-trials.jsonl"))
    trials: list[dict[str, Any]] = []
    for seed in range(3 if arguments.quick else arguments.seeds):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            trials.append(
                kept.result("late-memory", seed, lambda seed=seed, to=folder: trial(seed, Path(to)))
            )
    for line in judged(trials):
        report.add(line)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
