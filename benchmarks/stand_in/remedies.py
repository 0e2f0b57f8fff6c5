"""Remedies for slow jobs over NCCL, on the stand-in GPU: shares of micro-batches, an exchange of nodes, a replacement.

    python -m benchmarks.stand_in.remedies [--part s2|megatron|s3|s4] [--seeds N] [--json FILE]

Each job is a Session on 4 ranks whose hosts run ahead of their devices (`jobs/remedies.py`); keepstep is told nothing.

- S2: DDP, and megatron-core on two pipelines of two stages. A device turns slow, and later fast again. Time is virtual,
  so that iterations are compared with the best that any shares can do, reckoned from the kernels: exactly for DDP; a
  pipeline is taken for its slower stage's micro-batches, and one of the other's to fill it.
- S3: two pipelines of two stages on four nodes with ports of RoCE, in real pace. The link of a data-parallel pair turns
  slow, and later fast again. Needs root, for mount namespaces.
- S4: the same on two nodes of two ranks with a spare. The devices of a node turn slow for good.

Values are compared with those of an undisturbed training: bit by bit, but for S2, where other shares change the order
of sums. ``make cuda`` first. With FILE, the trials are kept beside it (``FILE-trials.jsonl``).
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._report import Line, Report, bench_arguments
from benchmarks._trials import Trials
from benchmarks.stand_in.launch import is_installed
from benchmarks.stand_in.ports import missing
from benchmarks.stand_in.remedy_trials import DDP, MEGATRON, exchange, replacement, shares

GOAL, RATIO = "within 5 % of the best shares", 1.05
PAUSE_GOAL, PAUSE_S = "pause ≤ 5 s", 5.0
LIMIT = "a stand-in for the GPU"


def judged_shares(name: str, trials: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The figures of S2."""
    good = [one for one in trials if not one["failed"]]
    ratios = [one["ratio"] for one in good]
    said = [
        f"rank ×{one['factor']:g}: ms an iteration {_ms(one, 'before_s', 'slowed_s')}, then "
        f"{_ms(one, 'after_s')} of {_ms(one, 'bound_s')} as reckoned, {_ms(one, 'back_s')} in the end; in force after "
        f"{one['in_force_after']} steps, equal {one['equal_after']} steps after the device was fast again"
        for one in good
    ]
    worst = max((one["error"] for one in good), default=0.0)
    values = f"{sum(one['compared'] for one in good)} values differ by {worst:.1g} at most from an undisturbed run's"
    return [
        Line(
            f"S2, {name}: after it, × the best shares as reckoned, median of {len(good)} of {len(trials)}",
            statistics.median(ratios) if ratios else None,
            "",
            GOAL,
            len(good) == len(trials) and max(ratios) <= RATIO,
            limit="; ".join([*said, *_failures(trials), values, f"{LIMIT}, whose time is virtual"]),
        )
    ]


def judged_moves(name: str, trials: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The figures of S3 or S4."""
    good = [one for one in trials if not one["failed"]]
    pauses = [move["pause_s"] for one in good for move in one["moves"]]
    failed = _failures(trials)
    keys = ("before_s", "during_s", "after_s", "back_s")
    said = [
        "ms an iteration: "
        + ", ".join(f"{key.removesuffix('_s')} {1000 * one[key]:.0f}" for key in keys if one.get(key))
        + f"; slow for {one['slow_until_moved_s']} s until then"
        + (f"; {one['fast_until_back_s']} s from fast to back" if "fast_until_back_s" in one else "")
        for one in good
    ]
    again = [move["made_again"] for one in good for move in one["moves"]]
    values = sum(one["compared"] for one in good)
    more = [f"steps made again: {again}", f"{values} values bit-equal to an undisturbed run's", LIMIT]
    return [
        Line(
            f"{name}: pause, median of {len(pauses)}, {len(good)} of {len(trials)} jobs went well",
            statistics.median(pauses) if pauses else None,
            "s",
            PAUSE_GOAL,
            bool(pauses) and not failed and max(pauses) <= PAUSE_S,
            limit="; ".join([*said, *failed, *more]),
        )
    ]


def _failures(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"seed {one['seed']}: {one['failed'][:200]}" for one in trials if one["failed"]]


def _ms(trial: Mapping[str, Any], *keys: str) -> str:
    return ", ".join(f"{1000 * trial[key]:.0f}" for key in keys)


class Part(NamedTuple):
    """A part of the bench: one kind of trial, and what is made of all of them."""

    name: str
    trial: Callable[[int, Path], dict[str, Any]]
    judged: Callable[[Sequence[Mapping[str, Any]]], list[Line]]
    lacks: str = ""


def parts() -> dict[str, Part]:
    """By its name in the command."""
    no_megatron = "" if is_installed("megatron.core") else "megatron-core is not installed (make frameworks)"
    link, node = "S3, a slow link of a data-parallel pair", "S4, a slow node, with a spare"
    return {
        "s2": Part("DDP", partial(shares, DDP), partial(judged_shares, "DDP")),
        "megatron": Part(
            "megatron-core", partial(shares, MEGATRON), partial(judged_shares, "megatron-core"), no_megatron
        ),
        "s3": Part(link, exchange, partial(judged_moves, link), missing()),
        "s4": Part(node, replacement, partial(judged_moves, node)),
    }


def main() -> None:
    parser = bench_arguments("stand_in.remedies", "Remedies for slow jobs over NCCL, on the stand-in GPU.")
    parser.add_argument("--part", choices=("s2", "megatron", "s3", "s4"), help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    report = Report("remedies on the stand-in", quick=arguments.quick)
    path = arguments.json and arguments.json.with_name(f"{arguments.json.stem}-trials.jsonl")
    kept = Trials(path, ("name", "seed", "failed"))
    for name, part in parts().items():
        if arguments.part not in (None, name):
            continue
        if part.lacks:
            report.leave_out(part.name, part.lacks)
            continue
        trials: list[dict[str, Any]] = []
        for seed in range(1 if arguments.quick else arguments.seeds):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                trials.append(kept.result(name, seed, partial(part.trial, seed, Path(folder))))
        for line in part.judged(trials):
            report.add(line)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
