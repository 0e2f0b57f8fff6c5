"""Bits that are turned over, and jobs that are healthy, without training; and what all of it costs.

    python -m benchmarks.corrupt.without_training [--seeds 200] [--first 0] [--saves 20000] [--json FILE]

Each seed is a job of two to five ranks in one process, on one node or a node each, with real snapshots, caches, agents'
tellers and the controller's core (`harness`); its gradients are drawn. Seeds with a bit turned over just before a save
have up to three habits of what differs by right, healthy ones two to all (`engine.HABITS`). A seed with a bit passes
when one incident names the rank (of two both, as one of them), the tensor and the step. The results, by seed, go to
``FILE-trials.jsonl``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from benchmarks._report import Line, Report, bench_arguments
from benchmarks.checkpoint.served import served
from benchmarks.corrupt.engine import (
    DECAYED,
    HABITS,
    OPTIMIZERS,
    EngineRank,
    Job,
    corrupt,
    drawn,
    trained,
)
from benchmarks.corrupt.harness import Harness

_FLIP_STEPS = 16
_HEALTHY_SAVES = 100  # of one job
_PARAMETERS, _RANKS = 300, 8  # of the job whose cost is measured
_UNHELPFUL = {"apart", "restart", "twice"}  # habits that no seed with a bit has: its step would not be plain


def flipped(seed: int) -> dict[str, Any]:
    """A job in which a bit is turned over, and what is wrong with what was said of it; "why": nothing."""
    chances = random.Random(f"corrupt:flip:{seed}")
    kinds = [*OPTIMIZERS, *(one for one in DECAYED if one != "decayed sgd")]
    job = drawn(chances, _FLIP_STEPS, 3, kinds)
    job.habits = [one for one in job.habits if one not in _UNHELPFUL]
    rank, step = chances.randrange(job.ranks), chances.randint(6, _FLIP_STEPS - 2)
    job.at["thawed part"] = 1
    which, element, bit = chances.randrange(1 << 20), chances.randrange(1 << 20), chances.randrange(32)
    turned: list[str] = []

    def turn(harness: Harness[EngineRank], number: int) -> None:
        if number == step:
            turned.append(_turn(harness.ranks[rank], job, which, element, bit))

    harness, _ = trained(job, turn)
    found = corrupt(harness)
    why = ""
    if len(found) != 1:
        why = f"{len(found)} incidents"
    else:
        one = found[0]
        ranks = tuple(culprit.rank for culprit in one.culprits)
        sure = all(culprit.confidence == "high" for culprit in one.culprits)
        if ranks != ((0, 1) if job.ranks == 2 else (rank,)) or sure != (job.ranks > 2):
            why = f"ranks {ranks}, {'sure' if sure else 'not sure'}"
        elif one.onset_step != step or turned[0] not in one.culprits[0].detail:
            why = f"step {one.onset_step}: {one.culprits[0].detail}"
    truth = {"rank": rank, "step": step, "tensor": turned[0], "bit": bit}
    return {"what": "flip", "seed": seed, "passed": not why, "why": why, "truth": truth, "job": asdict(job)}


def _turn(rank: EngineRank, job: Job, which: int, element: int, bit: int) -> str:
    tensors: dict[str, torch.Tensor] = {
        f"shared.weights.{number}": one.detach() for number, one in enumerate(rank.shared.parameters)
    }
    if job.kind not in DECAYED:  # there only parameters are proven to be wrong where weight decay is all
        for number, kept in rank.shared.optimizer.state_dict()["state"].items():
            values = {name: one for name, one in kept.items() if isinstance(one, torch.Tensor)}
            tensors |= {f"shared.optimizer.state.{number}.{name}": one for name, one in values.items()}
    name = list(tensors)[which % len(tensors)]
    flat = tensors[name].view(-1).view(torch.int32)
    flat[element % len(flat)] ^= (1 << bit) if bit < 31 else -(1 << 31)
    return name


def healthy(seed: int) -> dict[str, Any]:
    """A healthy job, and who was named in it."""
    chances = random.Random(f"corrupt:healthy:{seed}")
    job = drawn(chances, _HEALTHY_SAVES, chances.randint(2, len(HABITS)), [*OPTIMIZERS, *DECAYED])
    job.at = {name: min(step, chances.randint(4, 60)) for name, step in job.at.items()}
    harness, saves = trained(job)
    named = [(one.onset_step, [culprit.detail for culprit in one.culprits]) for one in corrupt(harness)]
    return {"what": "healthy", "seed": seed, "saves": saves, "named": named, "job": asdict(job)}


class _Large(EngineRank):
    """A rank with many parameters, all shared."""

    def __init__(self, number: int) -> None:
        sizes = [16] * _PARAMETERS
        super().__init__(Job(_RANKS, 1, "adamw", sizes, (), 0, 1), number)


def cost() -> dict[str, float]:
    """CPU seconds a save for 300 parameters under AdamW, which are 1,200 tensors a rank; eight ranks on a node."""
    saves = 20
    with served() as address:
        harness = Harness([address], _RANKS, _Large)
        harness.train(1, 5)
        teller, taken = harness.tellers[0], {"agent": 0.0, "controller": 0.0}
        send = teller._send  # pyright: ignore[reportPrivateUsage]

        def timed(message: Any) -> None:
            begun_s = time.thread_time()
            send(message)
            taken["controller"] += time.thread_time() - begun_s

        teller._send = timed  # pyright: ignore[reportPrivateUsage]
        look = teller.look

        def timed_look() -> None:
            begun_s = time.thread_time()
            look()
            taken["agent"] += time.thread_time() - begun_s

        teller.look = timed_look
        harness.train(6, 5 + saves)
        watch = harness.snapshots[0]._watch  # pyright: ignore[reportPrivateUsage]
        worker_s = _worker_s(watch, harness.ranks[0])
        harness.close()
    agent_s = taken["agent"] - taken["controller"]
    return {"worker": worker_s, "agent": agent_s / saves, "controller": taken["controller"] / saves}


def _worker_s(watch: Any, rank: EngineRank) -> float:
    """What a worker's main thread spends more: on families, less what it spent on the storages of optimizers before."""
    from keepstep.checkpoint.optimizers import Family, _identities  # pyright: ignore[reportPrivateUsage]
    from keepstep.checkpoint.state import flatten, with_families, with_state_dicts

    watch._known.clear()
    watch._known.add(rank.shared.optimizer)
    header, spans = flatten(with_state_dicts(rank.state), step=1)
    optimizer, rounds = rank.shared.optimizer, 20

    def now() -> None:
        families: list[Family] = watch.families()
        with_families(header, spans, families)
        _ = {one for family in families for one in family.storages}

    def before() -> None:
        kept = (value for state in optimizer.state.values() for value in state.values())
        _ = {
            *_identities(one for group in optimizer.param_groups for one in group["params"]),
            *_identities(kept),
        }

    took: list[float] = []
    for work in (now, before):
        work()
        begun_s = time.thread_time()
        for _ in range(rounds):
            work()
        took.append((time.thread_time() - begun_s) / rounds)
    return took[0] - took[1]


def main() -> int:
    parser = bench_arguments("corrupt.without_training", __doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seeds", type=int, default=200, help="jobs in which a bit is turned over")
    parser.add_argument("--first", type=int, default=0, help="first seed, also of healthy jobs")
    parser.add_argument("--saves", type=int, default=20_000, help="of healthy jobs, at least")
    given = parser.parse_args()
    report = Report("corrupt.without_training", quick=given.quick)
    results: list[dict[str, Any]] = []
    with contextlib.redirect_stderr(io.StringIO()):  # snapshots say how much memory they take
        results += [flipped(seed) for seed in range(given.first, given.first + given.seeds)]
        saves, seed = 0, given.first
        while saves < given.saves:
            results.append(healthy(seed))
            saves, seed = saves + results[-1]["saves"], seed + 1
        took = cost()
    flips = [one for one in results if one["what"] == "flip"]
    passed = sum(one["passed"] for one in flips)
    goal = "named at the next save in all, the right rank where there are three replicas"
    report.add(Line("bits turned over", f"{passed}/{len(flips)}", "seeds", goal, passed == len(flips)))
    false = sum(len(one.get("named", ())) for one in results)
    jobs = len(results) - len(flips)
    report.add(
        Line(
            f"false in {saves} saves of {jobs} jobs", false, "incidents", "0 false in 20,000 saves", not false
        )
    )
    limit = f"{_PARAMETERS} parameters under AdamW, {_RANKS} ranks on one node"
    for who, per_s in took.items():
        report.add(Line(f"CPU time a save, {who}", round(per_s * 1e3, 3), "ms", limit=limit))
    report.finish(given.json)
    if given.json:
        lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in results)
        Path(given.json).with_name(f"{Path(given.json).stem}-trials.jsonl").write_text(lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
