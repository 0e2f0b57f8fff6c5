"""Slow GPUs under hosts that run ahead, on the stand-in GPU: who is named, after how many iterations, how exactly.

    python -m benchmarks.stand_in.slow_devices [--seeds N] [--json FILE]

Each seed draws a layout, a number of ranks, a factor (1: all are healthy), a rank and an onset. ``make cuda`` first.
With FILE, the trials are kept beside it (``FILE-trials.jsonl``), and seeds that are there are not run again.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks.stand_in.faults import Fault
from benchmarks.stand_in.launch import TRAIN, Done, run
from keepstep.core.events import Device, Kind
from keepstep.ring import RingReader

_AFTER = 25  # steps after the onset
_HISTORY = 30  # steps from which on a rank's own past is the measure, and not its peers


def trial(seed: int, folder: Path) -> dict[str, Any]:
    """One job; what was drawn and what came of it."""
    draw = random.Random(seed)
    layout = draw.choice(("ddp", "fsdp2", "pipeline"))
    ranks = 4 if layout == "pipeline" else draw.choice((2, 4))
    factor = draw.choice((1.0, 1.3, 2.0, 4.0))
    slow, onset = draw.randrange(ranks), draw.choice((0, 3, 8, 12, *range(35, 50)))
    done = run(
        TRAIN,
        ["--layout", layout, "--steps", str(onset + _AFTER)],
        folder,
        ranks=ranks,
        faults=[Fault("slow", rank=slow, step=onset, value=factor)] if factor > 1 else [],
        clock="virtual",
        kernel_us=2000,
        values=layout == "pipeline",
        timeout_s=240,
    )
    drawn = {"seed": seed, "layout": layout, "ranks": ranks, "factor": factor, "rank": slow, "onset": onset}
    told = sorted((done.folder / "run" / "incidents").glob("*.json"))
    incidents = [json.loads(path.read_text()) for path in told]
    named = [
        {
            "rank": culprit["rank"],
            "cause": culprit["cause"],
            "confidence": culprit["confidence"],
            "iterations": incident["detected_step"] - onset + 1,
        }
        for incident in incidents
        for culprit in incident["culprits"]
    ]
    right = [one["rank"] for one in named] == ([slow] if factor > 1 else [])
    return {
        **drawn,
        "exit_code": done.exit_code,
        "right": right,
        "named": named,
        "error": worst_error(done, ranks),
    }


def worst_error(done: Done, ranks: int) -> float:
    """The largest error of a measured iteration's duration, as a part of the device's own."""
    worst = 0.0
    for rank in range(ranks):
        rows = RingReader(done.folder / "run" / "rings" / f"rank-{rank:05d}.ring").snapshot()
        rows = rows[(rows["kind"] == int(Kind.DEVICE)) & (rows["op"] == int(Device.ITERATION))]
        marks = done.devices[rank].marks
        for number, began, ended in rows[["peer", "wait_ns", "end_ns"]].tolist():
            if number - 1 in marks and number - 2 in marks:
                truth = marks[number - 1] - marks[number - 2]
                worst = max(worst, abs((ended - began) / truth - 1))
    return worst


def judged(trials: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The figures of these trials."""
    slow = [one for one in trials if one["factor"] > 1]
    healthy = [one for one in trials if one["factor"] == 1]
    right = sum(one["right"] for one in slow)
    wrong = sum(
        named["confidence"] == "high" and (named["rank"] != one["rank"] or one["factor"] == 1)
        for one in trials
        for named in one["named"]
    )
    after = [one["named"][0]["iterations"] for one in slow if one["right"] and one["onset"] >= _HISTORY]
    error = max((one["error"] for one in trials), default=0.0)
    accused = sum(not one["right"] for one in healthy)
    limit = "a stand-in for the GPU, whose time is virtual"
    return [
        Line(
            "slow GPU named", f"{right} of {len(slow)}", "", ">= 97 %", right >= 0.97 * len(slow), limit=limit
        ),
        Line("wrong with confidence high", wrong, "", "0", wrong == 0),
        Line("healthy jobs accused", f"{accused} of {len(healthy)}", "", "0", accused == 0),
        Line("found after", max(after, default=None), "iterations, at most", "3", max(after, default=9) <= 3),
        Line("error of an iteration", round(100 * error, 6), "%, at most", "0.5 %", error <= 0.005),
    ]


def main() -> None:
    parser = bench_arguments(
        "stand_in.slow_devices", "Slow GPUs under hosts that run ahead, on the stand-in GPU."
    )
    parser.add_argument("--seeds", type=int, default=12)
    arguments = parser.parse_args()
    report = Report("slow devices on the stand-in", quick=arguments.quick)
    kept = arguments.json and arguments.json.with_name(f"{arguments.json.stem}-trials.jsonl")
    lines = kept.read_text().splitlines() if kept and kept.exists() else []
    trials = {one["seed"]: one for one in map(json.loads, lines)}
    for seed in range(4 if arguments.quick else arguments.seeds):
        if seed in trials:
            continue
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            trials[seed] = trial(seed, Path(folder))
        print(json.dumps(trials[seed]), flush=True)
        if kept:
            kept.write_text("".join(json.dumps(one) + "\n" for one in trials.values()))
    for line in judged(list(trials.values())):
        report.add(line)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
