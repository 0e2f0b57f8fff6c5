"""Checkpoints, misused in ten ways by real jobs: one line, no stall above a step, never a mixed restore.

    python -m benchmarks.misuse [--seeds 2] [--kinds "disk full,…"] [--json benchmarks/results/misuse.json]

Each trial is one kind in one way of saving (`kinds.WAYS`) with one seed. Its judge compares all losses, bit by bit,
with those of an undisturbed training; counts the lines of the consoles that name the misuse, and all other lines about
checkpoints that a job without misuse does not have; and the time of each save with that of a step. Trials lie in a file
beside the JSON, failed ones too, and are not run again at the same commit.
"""

from __future__ import annotations

import os
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks._trials import Trials
from benchmarks.checkpoint_faults.campaign import losses
from benchmarks.misuse.kinds import KINDS, STEPS, Kind, Played, plain
from benchmarks.misuse.running import Job, run

GOAL = "one line each, no stall above one step, never a mixed restore"
LEAST_STALL_S = 1.0
"""A save may take so long even if steps are shorter: the first one imports what it needs, and a step of the tiny job
takes 0.1 s, less than what two busy cores keep a process from running."""

_ABOUT = re.compile(
    r"checkpoint|snapshot|sav(e|ing)\b|saved|storage|restor|KEEPSTEP_CHECKPOINT", re.IGNORECASE
)
_USUAL = re.compile(
    r"snapshots of rank \d+ take|resumed after step|run folder|what is not marked|keepstep report"
)


@cache
def undisturbed(seed: int, ranks: int, width: int, dtype: str) -> dict[int, dict[int, set[str]]]:
    """The losses by rank of a training that saves nothing."""
    with tempfile.TemporaryDirectory(prefix="keepstep-misuse-", ignore_cleanup_errors=True) as name:
        job = plain("no-watch", Path(name), seed, ranks)
        orders = replace(
            job.orders, steps=STEPS + 3, step_s=0.0, savers=(), width=width, dtype=dtype, way="save"
        )
        ended = run(replace(job, orders=orders), Path(name), "run")
        if ended.codes != [0]:
            raise RuntimeError(f"the undisturbed training ended with {ended.codes}: {ended.said[-400:]}")
        return {rank: losses(Path(orders.folder), rank) for rank in range(ranks)}


def times_of(job: Job, rank: int) -> list[tuple[float, float]]:
    """Seconds of each step without its save, and of the save."""
    try:
        rows = (Path(job.orders.folder) / f"time-{rank}").read_text().splitlines()
    except OSError:
        return []
    return [(float(step_s), float(save_s)) for _, step_s, save_s in map(str.split, rows)]


def other_losses(job: Job, ended_well: bool) -> Iterator[str]:
    """What is wrong with the losses of a job."""
    orders = job.orders
    expected = undisturbed(orders.seed, job.ranks, orders.width, orders.dtype)
    for rank in range(job.ranks):
        found = losses(Path(orders.folder), rank)
        mixed = [step for step in found if found[step] != expected[rank].get(step)]
        if mixed:
            yield f"rank {rank}: losses of steps {mixed} are not those of the undisturbed training"
        if ended_well and orders.steps - 1 not in found:
            yield f"rank {rank}: did not come to its last step"


def judged(kind: Kind, played: Played) -> tuple[list[str], dict[str, Any]]:
    """What is wrong, a line each; and figures."""
    wrong = list(played.wrong)
    said = [line for ended in played.ended for line in ended.said.splitlines()]
    about = [line for line in said if _ABOUT.search(line) and not _USUAL.search(line)]
    named = [line for line in about if kind.says and re.search(kind.says, line)]
    if kind.says and len(named) != 1:
        wrong.append(f"{len(named)} lines name it")
    others = [line for line in about if line not in named]
    if others:
        wrong.append(f"{len(others)} more lines about checkpoints")
    longest_s, step_s = 0.0, 0.0
    for job, ended, code, ends_well in zip(
        played.jobs, played.ended, played.expected, played.whole, strict=True
    ):
        if any(one != code for one in ended.codes):
            wrong.append(f"the job ended with {ended.codes} instead of {code}")
        wrong += other_losses(job, ends_well)
        for rank in range(job.ranks):
            times = times_of(job, rank)
            if times:
                longest_s = max(longest_s, *(save_s for _, save_s in times))
                step_s = max(step_s, statistics.median(step for step, _ in times))
    if longest_s > max(step_s, LEAST_STALL_S):
        wrong.append(f"a save took {longest_s:.2f} s, a step {step_s:.2f} s")
    if played.last and played.last not in played.stored:
        wrong.append(f"step {played.last} is not on storage, {played.stored} are")
    return wrong, {
        "longest_save_s": round(longest_s, 3),
        "step_s": round(step_s, 3),
        "lines": [*named, *others],
    }


def trial(name: str, way: str, seed: int) -> dict[str, Any]:
    """Runs and judges one trial."""
    kind = KINDS[name]
    chances = random.Random(f"{name}/{way}/{seed}")
    with tempfile.TemporaryDirectory(prefix="keepstep-misuse-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        job = plain(way, folder, seed, 2 if way == "nodes" else chances.choice((2, 3)))
        try:
            played = kind.play(job, folder, chances)
        except TimeoutError as error:
            return {"failed": str(error)}
        wrong, figures = judged(kind, played)
        told = "\n".join(one.said for one in played.ended)[-3000:] if wrong else ""
        return {
            "failed": "; ".join(wrong),
            "way": way,
            "ranks": job.ranks,
            "codes": [one.codes for one in played.ended],
            **figures,
            "lines": [line.replace(text, "") for line in figures["lines"]],
            "orders": {key: value for key, value in asdict(played.jobs[0].orders).items() if key != "folder"},
            "said": told.replace(text, ""),
        }


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_arguments("misuse", __doc__ or "")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of each kind and way (2)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="only these")
    parser.add_argument("--ways", default="", help="only these ways of saving")
    given = parser.parse_args(argv)
    report = Report("misuse", quick=given.quick, packages=("keepstep", "torch"))
    path = given.json.with_name(f"{given.json.stem}-trials.jsonl") if given.json else None
    trials = Trials(path, ("name", "seed", "failed", "longest_save_s", "lines"))
    for name in given.kinds.split(","):
        kind = KINDS[name]
        if kind.root and os.geteuid() != 0:
            report.leave_out(name, "mounts a file system, which takes root")
            continue
        ways = [way for way in kind.ways if not given.ways or way in given.ways.split(",")]
        ways = ways[:1] if given.quick else ways
        found = [
            trials.result(f"{name}, {way}", seed, lambda n=name, w=way, s=seed: trial(n, w, s))
            for way in ways
            for seed in range(1 if given.quick else given.seeds)
        ]
        good = sum(not one["failed"] for one in found)
        longest_s = max((one.get("longest_save_s", 0.0) for one in found), default=0.0)
        worst = next(
            (f"{one['name']} seed {one['seed']}: {one['failed']}" for one in found if one["failed"]), ""
        )
        limit = f"longest save {longest_s:.2f} s; ways: {', '.join(ways)}" + (f"; {worst}" if worst else "")
        report.add(Line(name, f"{good}/{len(found)}", "trials", GOAL, good == len(found), limit=limit))
    report.finish(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
