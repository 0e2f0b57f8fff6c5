"""False alarms of the change-point detector on replayed healthy iteration times.

The series are those that keepstep measured in the healthy runs of the campaign; a block bootstrap makes long ones of
them (blocks of consecutive iterations, drawn with replacement, all of one rank of one run).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.campaign.case import WARM_UP_STEPS

STREAM = 5_000  # iterations of one replayed series
BLOCK = 25
AT_LEAST = 200_000  # iterations in all


def healthy_series(results: Iterable[Mapping[str, Any]]) -> list[list[float]]:
    """Iteration times per rank and healthy run, warm-up left out, from the campaign's results."""
    series: list[list[float]] = []
    for result in results:
        watched: dict[str, list[float]] = result.get("watched", {})
        series += [
            values[WARM_UP_STEPS:] for values in watched.values() if len(values) > 2 * BLOCK + WARM_UP_STEPS
        ]
    return series


def bootstrap(series: list[float], length: int, chance: random.Random) -> list[float]:
    """A series of ``length`` iterations made of blocks of ``series``."""
    made: list[float] = []
    while len(made) < length:
        start = chance.randrange(len(series) - BLOCK + 1)
        made += series[start : start + BLOCK]
    return made[:length]


def replay(results: Iterable[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """Feed the detector at least 200,000 healthy iterations in series of 5,000; ``passed`` when none is reported."""
    from keepstep.detect import ChangePointDetector

    series = healthy_series(results)
    if not series:
        return {
            "passed": False,
            "why": ["no healthy runs are kept: run --case healthy first"],
            "measured": {},
        }
    chance = random.Random(f"replay:{seed}")
    fed = 0
    alarms: list[dict[str, Any]] = []
    while fed < AT_LEAST:
        for number, healthy in enumerate(series):
            detector = ChangePointDetector()
            for seconds in bootstrap(healthy, STREAM, chance):
                found = detector.update(seconds)
                if found is not None:
                    alarms.append(
                        {"series": number, "kind": found.kind, "index": found.index, "ratio": found.ratio}
                    )
            fed += STREAM
    rate = len(alarms) / fed * 100_000
    why = [] if rate < 1 else [f"{len(alarms)} alarms in {fed} iterations"]
    measured = {"iterations": fed, "series": len(series), "alarms": len(alarms), "alarms_per_100000": rate}
    return {"passed": not why, "why": why, "measured": measured, "alarms": alarms[:50]}
