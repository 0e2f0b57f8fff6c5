"""Change points: Turing dataset, a synthetic suite beside GREYHOUND's methods, false alarms, delay, time per point."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from benchmarks._report import Line, Report, bench_arguments
from benchmarks.changepoint import tcpd as _tcpd
from benchmarks.changepoint import workloads as _workloads
from benchmarks.changepoint.baselines import Report as Found
from benchmarks.changepoint.baselines import bocd, sliding_window

from keepstep.detect import ChangePointDetector, change_points

_SYNTHETIC = "synthetic series"


@dataclass(frozen=True, slots=True)
class Score:
    """Shares of traces judged entirely right, of traces with a false report, and of true changes missed."""

    accuracy: float
    false_positive_rate: float
    false_negative_rate: float


def ours(series: Sequence[float]) -> list[Found]:
    return [
        (found.index, found.detected_at, found.ratio)
        for found in change_points(series, ChangePointDetector())
    ]


METHODS: dict[str, Callable[[Sequence[float]], list[Found]]] = {
    "keepstep": ours,
    "SlidingWindow": sliding_window,
    "BOCD": bocd,
    "BOCD+V": lambda series: bocd(series, verify=True),
}


def judge(trace: _workloads.Trace, found: Sequence[Found]) -> tuple[int, int]:
    """(true changes missed, false reports): a report is right in a change's time, in its direction."""
    missed = 0
    right: set[int] = set()
    for change in trace.changes:
        toward = {
            place
            for place, (index, detected_at, ratio) in enumerate(found)
            if change.begin - 10 <= index and change.begin <= detected_at and (ratio > 1) == change.slower
        }
        in_time = {place for place in toward if found[place][1] <= change.end}
        missed += not in_time
        # What a gradual change adds up to may be reported in several steps, all of them right.
        right |= toward if change.gradual else in_time
    return missed, len(found) - len(right)


def score(method: Callable[[Sequence[float]], list[Found]], traces: Sequence[_workloads.Trace]) -> Score:
    judged = [judge(trace, method(trace.seconds.tolist())) for trace in traces]
    changes = sum(len(trace.changes) for trace in traces)
    return Score(
        mean(missed == 0 and false == 0 for missed, false in judged),
        mean(false > 0 for _, false in judged),
        sum(missed for missed, _ in judged) / changes,
    )


def turing(report: Report, folder: Path | None) -> None:
    if folder is None or not (folder / "annotations.json").exists():
        report.leave_out(
            "TCPD F1 and cover", "no series: set KEEPSTEP_SAMPLES or --samples to a folder with tcpd/"
        )
        return
    series = _tcpd.load(folder)
    scores: dict[str, tuple[list[float], list[float]]] = {"keepstep": ([], []), "BOCD (ours)": ([], [])}
    for one in series:
        detector = ChangePointDetector(warmup=0, min_change=0)
        marks = {
            "keepstep": [found.index for found in change_points(one.values, detector)],
            "BOCD (ours)": [index for index, _, _ in bocd(one.values)],
        }
        for name, predicted in marks.items():
            scores[name][0].append(_tcpd.f1(one.annotations, predicted))
            scores[name][1].append(_tcpd.cover(one.annotations, predicted, len(one.values)))
    for place, (label, field) in enumerate((("F1 (margin 5)", "f1"), ("cover", "cover"))):
        peers = {"BOCD (ours)": round(mean(scores["BOCD (ours)"][place]), 4)}
        for method in ("bocpd", "pelt", "binseg"):
            published = [
                one.published[method][f"default_{field}"] for one in series if method in one.published
            ]
            if len(published) == len(series):
                peers[f"published default {method}"] = round(mean(published), 4)
        empty = [
            _tcpd.f1(s.annotations, []) if not place else _tcpd.cover(s.annotations, [], len(s.values))
            for s in series
        ]
        peers["no change point"] = round(mean(empty), 4)
        value = mean(scores["keepstep"][place])
        bar = peers.get("published default bocpd")
        report.add(
            Line(
                f"TCPD {label}, {len(series)} series",
                round(value, 4),
                "",
                "at or above published default BOCPD on the same series",
                None if bar is None else value >= bar,
                dict(peers),
                "one setting for all: warmup 0, min_change 0",
            )
        )


def speed(report: Report, repetitions: int) -> None:
    series = _workloads.healthy_noise("gaussian", 0.03, 20_000, 1).tolist()
    times: dict[str, float] = {}
    for name, method in (("keepstep", ours), ("BOCD", METHODS["BOCD"])):
        best = float("inf")
        for _ in range(repetitions if name == "keepstep" else 1):
            began = time.perf_counter()
            method(series)
            best = min(best, time.perf_counter() - began)
        times[name] = best / len(series) * 1e6
    report.add(
        Line(
            "time per point at 20,000 points",
            round(times["keepstep"], 1),
            "µs",
            "<= 60 µs a point at 20,000 points",
            times["keepstep"] <= 60,
            {"BOCD (ours, numpy)": round(times["BOCD"], 1)},
        )
    )


def suite(report: Report, seeds: int) -> None:
    for variant in _workloads.VARIANTS:
        for kind in _workloads.KINDS:
            traces = [
                _workloads.trace(kind, variant, seed, faulty=faulty)
                for seed in range(seeds)
                for faulty in (True, False)
            ]
            scores = {name: score(method, traces) for name, method in METHODS.items()}
            for field, unit, sign in (
                ("accuracy", "accuracy", 1),
                ("false_positive_rate", "FPR", -1),
                ("false_negative_rate", "FNR", -1),
            ):
                values = {name: round(100 * getattr(one, field), 2) for name, one in scores.items()}
                value = values.pop("keepstep")
                report.add(
                    Line(
                        f"{variant} {kind}: {unit}",
                        value,
                        "%",
                        "ours best or equal in every row",
                        all(sign * value >= sign * other for other in values.values()),
                        dict(values),
                        f"{_SYNTHETIC}, {len(traces)} traces of {_workloads.LENGTH} iterations",
                    )
                )


def false_alarms(report: Report, length: int) -> None:
    counts: dict[str, float] = {}
    total = 0
    for name in ("gaussian", "lognormal", "correlated", "heavy-tailed", "gc"):
        for cov in (0.01, 0.03, 0.05, 0.07):
            found = ours(_workloads.healthy_noise(name, cov, length, 3).tolist())
            counts[f"{name} {cov:.0%}"] = len(found)
            total += len(found)
    iterations = length * len(counts)
    rate = total * 1e5 / iterations
    report.add(
        Line(
            "false alarms per 100,000 healthy iterations",
            round(rate, 3),
            "",
            "< 1 per 100,000 replayed iterations",
            rate < 1,
            {},
            f"{_SYNTHETIC}, {iterations:,} iterations; worst of {len(counts)} noises: "
            f"{max(counts, key=lambda name: counts[name])}: {max(counts.values())} in {length:,}",
        )
    )


def delays(report: Report, seeds: int) -> None:
    for factor in (1.14, 1.3, 2.0, 4.0):
        onsets: list[int] = []
        reliefs: list[int] = []
        for seed in range(seeds):
            series = _workloads.healthy_noise("gaussian", 0.03, 240, 1000 + seed)
            series[100:170] *= factor
            found = ours(series.tolist())
            onsets.append(min((at - 100 for _, at, ratio in found if ratio > 1 and at >= 100), default=999))
            reliefs.append(min((at - 170 for _, at, ratio in found if ratio < 1 and at >= 170), default=999))
        within = float(np.mean([delay <= 3 for delay in onsets + reliefs]))
        report.add(
            Line(
                f"x{factor}: onsets and reliefs within 3 iterations",
                round(100 * within, 1),
                "%",
                "detection within 3 iterations of onset and of relief",
                within == 1.0,
                {
                    "median onset": float(np.median(onsets)),
                    "worst onset": max(onsets),
                    "median relief": float(np.median(reliefs)),
                    "worst relief": max(reliefs),
                },
                f"{_SYNTHETIC}, gaussian noise of 3 %, {seeds} seeds; delays in iterations after the first changed one",
            )
        )


def main() -> int:
    arguments = bench_arguments("changepoint", __doc__ or "").parse_args()
    report = Report("changepoint", quick=arguments.quick, packages=("keepstep", "numpy"))
    turing(report, arguments.samples / "tcpd" if arguments.samples else None)
    speed(report, 1 if arguments.quick else 5)
    false_alarms(report, 20_000 if arguments.quick else 100_000)
    delays(report, 30 if arguments.quick else 200)
    suite(report, 10 if arguments.quick else 50)
    report.finish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
