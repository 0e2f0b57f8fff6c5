"""Validation of a held NCCL job on the stand-in GPU: who is named, over which transport, and what it does to the job.

    python -m benchmarks.stand_in.validations [--seeds 0-19] [--json FILE]

Each seed draws a layout, 4 or 8 ranks, a slow rank, a slow pair and a pair over which nothing comes, and runs one job
that is validated four times: while all are healthy, then under each fault. Pairs are drawn from the links that a
validation tests. ``keepstep`` is told nothing but to validate all ranks. What comes of the training is laid beside a
job of the same layout without faults that nobody held. ``make cuda`` first. With FILE, a line for each seed is kept
beside it (``FILE-trials.jsonl``), and not run again at the same commit.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks._trials import Trials
from benchmarks.stand_in.faults import Fault
from benchmarks.stand_in.launch import TRAIN, Job, start
from keepstep import wire
from keepstep.cli._asking import ask
from keepstep.core.errors import RunError
from keepstep.core.ranges import expand_ranks
from keepstep.core.validation import Validation
from keepstep.validate.plan import transfers

KINDS = ("healthy", "slow", "slow-pair", "cut")
LAYOUTS, RANKS = ("ddp", "fsdp2", "pipeline"), (4, 8)
HOLD_S = 15.0  # the hosts' memory is copied for each message, by eight ranks on two cores
_FIRST, _WINDOW = 8, 70  # steps before the first kind, and of each: more than a hold is ordered ahead
_STEPS = _FIRST + _WINDOW * len(KINDS) + 2
_PACE_S, _KERNEL_US = 0.1, 1000
_LIMIT_S = 600.0
_TRIES = 3
# What the job's own watchers make of a slow rank is not asked here.
_FLAGS = ("--no-validate",)


def drawn(seed: int) -> dict[str, Any]:
    """What a seed draws."""
    draw = random.Random(f"validations {seed}")
    ranks = draw.choice(RANKS)
    links = [(one.source, one.target) for one in transfers([range(ranks)])]
    return {
        "layout": draw.choice(LAYOUTS),
        "ranks": ranks,
        "slow": draw.randrange(ranks),
        "factor": draw.choice((1.5, 2.0, 4.0)),
        "slow-pair": list(draw.choice(links)),
        "percent": draw.choice((50, 100, 300)),
        "cut": list(draw.choice(links)),
    }


def faults(told: Mapping[str, Any]) -> list[Fault]:
    """The faults of a seed, each in the steps of its kind."""
    begin = {kind: _FIRST + _WINDOW * place for place, kind in enumerate(KINDS)}

    (a, b), (c, d) = told["slow-pair"], told["cut"]
    all_of_them = [
        Fault("slow", rank=told["slow"], value=told["factor"], step=begin["slow"]),
        Fault("slow-pair", rank=a, peer=b, value=told["percent"], step=begin["slow-pair"]),
        Fault("cut", rank=c, peer=d, where="optimizer", step=begin["cut"]),
    ]
    return [replace(one, until=one.step + _WINDOW) for one in all_of_them]


def begun(
    told: Mapping[str, Any], folder: Path, played: Sequence[Fault], pace_s: float, kernel_us: int
) -> Job:
    """The job of a seed, at a pace that changes nothing of its values."""
    words = [
        "--layout",
        told["layout"],
        "--steps",
        str(_STEPS),
        "--pace-s",
        str(_PACE_S),
        "--tell-parameters",
    ]
    return start(
        TRAIN,
        words,
        folder,
        ranks=told["ranks"],
        flags=_FLAGS,
        faults=played,
        kernel_us=kernel_us,
        values=True,
    )


def step_of(job: Job) -> int:
    """The newest step that some rank is known to have done; -1: none."""
    try:
        rows = (job.folder / "run" / "nodes" / "0" / "iterations.jsonl").read_text().splitlines()
        return max((json.loads(row)["step"] for row in rows[-job.ranks :]), default=-1)
    except (OSError, ValueError, KeyError):
        return -1


def validated(job: Job, kind: str) -> dict[str, Any]:
    """One validation in the steps of this kind, asked again where it is refused."""
    first = _FIRST + _WINDOW * KINDS.index(kind)
    while step_of(job) < first:
        if job.is_over():
            raise RuntimeError(f"the job is over: {job.console()[-1000:]}")
        time.sleep(0.05)
    refused: list[str] = []
    for _ in range(_TRIES):
        asked = step_of(job)
        try:
            answer = ask(
                str(job.folder / "run"),
                wire.Validate((), HOLD_S),
                wire.Validated,
                90,
                only="not running",
                gone="gone",
            )
        except RunError as error:
            raise RuntimeError(str(error)) from error
        if answer.outcome is not None:
            ended = step_of(job)
            return {
                "refused": refused,
                "steps": [asked, ended],
                "is_in_time": ended < first + _WINDOW,
                **shorter(answer.outcome),
            }
        refused.append(answer.refused)
    raise RuntimeError(f"{kind}: refused: {refused}")


def shorter(outcome: Validation) -> dict[str, Any]:
    """What is kept of a validation."""
    speeds = [one.bytes_per_s for rank in outcome.figures for one in rank.links]
    return {
        "devices": {slow.figure.rank: round(slow.share, 3) for slow in outcome.devices},
        "links": {f"{slow.source}-{slow.target}": round(slow.share, 3) for slow in outcome.links},
        "transports": sorted({one.transport for rank in outcome.figures for one in rank.links}),
        "tested": [
            sum(bool(rank.devices) for rank in outcome.figures),
            len({(one.source, one.target) for rank in outcome.figures for one in rank.links}),
        ],
        "fastest_gb_s": round(max(speeds, default=0.0) / 1e9, 3),
        "missing": list(outcome.missing),
        "held_s": round(outcome.held_s, 2),
    }


def trial(seed: int, folder: Path) -> dict[str, Any]:
    """One job with its four validations; what was drawn and what came of it."""
    told = drawn(seed)
    with begun(told, folder, faults(told), _PACE_S, _KERNEL_US) as job:
        found = {kind: validated(job, kind) for kind in KINDS}
        done = job.finish(_LIMIT_S)
    return {
        "drawn": told,
        "found": found,
        "exit_code": done.exit_code,
        "parameters": parameters(done.console),
        "wall_s": done.wall_s,
    }


def untouched(told: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The same job without faults and validations."""
    with begun(told, folder, (), 0, 1) as job:
        done = job.finish(_LIMIT_S)
    return {"exit_code": done.exit_code, "parameters": parameters(done.console)}


def parameters(console: str) -> list[str]:
    """The checksum of each rank's parameters at the end."""
    return sorted(re.findall(r"rank \d+ ends with parameters [0-9a-f]{8}", console))


def is_right(one: Mapping[str, Any], kind: str) -> bool:
    """Whether exactly who was to be named was named, while the fault lasted, links over NCCL."""
    told, found = one["drawn"], one["found"][kind]
    devices = [str(told["slow"])] if kind == "slow" else []
    links = ["{}-{}".format(*told[kind])] if kind in ("slow-pair", "cut") else []
    return (
        [str(rank) for rank in found["devices"]] == devices
        and list(found["links"]) == links
        and found["transports"] == ["nccl"]
        and found["is_in_time"]
    )


def judged(trials: Sequence[Mapping[str, Any]], wholes: Mapping[str, Sequence[str]]) -> list[Line]:
    """The figures of these trials. ``wholes``: checksums of untouched jobs, by layout and ranks."""
    good = [one for one in trials if not one["failed"]]
    limit = "a stand-in for GPU and NCCL"
    lines: list[Line] = []
    for kind, name in zip(
        KINDS,
        (
            "healthy, nobody named",
            "slow device named",
            "slow pair named",
            "pair over which nothing comes named",
        ),
        strict=True,
    ):
        right = sum(is_right(one, kind) for one in good)
        lines.append(Line(name, f"{right} of {len(trials)}", "", "all", right == len(trials), limit=limit))
    holds = [found["held_s"] for one in good for found in one["found"].values()]
    within = sum(held_s <= HOLD_S for held_s in holds)
    lines.append(
        Line(
            "held no longer than asked for, a pair over which nothing comes too",
            f"{within} of {len(KINDS) * len(trials)}",
            "",
            "all",
            within == len(KINDS) * len(trials),
            limit=f"asked for up to {HOLD_S:g} s",
        )
    )
    ended = sum(
        one["exit_code"] == 0 and one["parameters"] == wholes.get(name_of(one["drawn"])) for one in good
    )
    lines.append(
        Line(
            "job ended, parameters those of one never held",
            f"{ended} of {len(trials)}",
            "",
            "all",
            ended == len(trials),
        )
    )
    for kind in KINDS:
        times = sorted(one["found"][kind]["held_s"] for one in good)
        if times:
            lines.append(
                Line(
                    f"held, {kind}, longest", times[-1], "s", limit=f"asked for up to {HOLD_S:g} s, busy host"
                )
            )
    return lines


def name_of(told: Mapping[str, Any]) -> str:
    return f"untouched {told['layout']} {told['ranks']}"


def main() -> None:
    parser = bench_arguments("stand_in.validations", "Validations of NCCL jobs on the stand-in GPU.")
    parser.add_argument("--seeds", default="0-19", help="such as 0-19")
    arguments = parser.parse_args()
    report = Report("validations on the stand-in", quick=arguments.quick)
    kept = Trials(arguments.json and arguments.json.with_name(f"{arguments.json.stem}-trials.jsonl"))
    trials: list[dict[str, Any]] = []
    wholes: dict[str, list[str]] = {}
    for seed in expand_ranks("0" if arguments.quick else arguments.seeds):
        told = drawn(seed)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            trials.append(
                kept.result("validations", seed, lambda seed=seed, at=Path(folder): trial(seed, at / "held"))
            )
            name = name_of(told)
            if name not in wholes:
                whole = kept.result(
                    name, 0, lambda told=told, at=Path(folder): untouched(told, at / "untouched")
                )
                wholes[name] = whole.get("parameters", [])
    for line in judged(trials, wholes):
        report.add(line)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
