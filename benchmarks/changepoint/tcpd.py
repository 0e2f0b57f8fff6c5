"""The Turing Change Point Dataset's two scores, from their definition (van den Burg and Williams, 2020, section 4).

``predicted`` are indices of the first observation of each new segment; the trivial change point 0 is added on
both sides. F1 matches within ``margin``, precision against all annotators together, recall averaged over
annotators; cover is the size-weighted best Jaccard overlap of each annotated segment, averaged over
annotators.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Series:
    """One univariate series: its values, one set of change points per annotator, and published scores."""

    name: str
    values: list[float]
    annotations: list[list[int]]
    published: dict[str, dict[str, float]]


def load(folder: Path) -> list[Series]:
    """Every series of ``folder`` that has annotations; missing observations become NaN."""
    annotations: dict[str, dict[str, list[int]]] = json.loads((folder / "annotations.json").read_text())
    published: dict[str, Any] = json.loads((folder / "published_scores.json").read_text())["scores"]
    series: list[Series] = []
    for name in sorted(annotations):
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        raw = json.loads(path.read_text())["series"][0]["raw"]
        values = [float("nan") if value is None else float(value) for value in raw]
        series.append(Series(name, values, list(annotations[name].values()), published.get(name, {})))
    return series


def f1(annotations: Sequence[Collection[int]], predicted: Iterable[int], margin: int = 5) -> float:
    """F1 in [0, 1] of ``predicted`` against one collection of change points per annotator."""
    found = {0, *predicted}
    truths = [{0, *marks} for marks in annotations]
    together: set[int] = set().union(*truths)
    precision = _matched(together, found, margin) / len(found)
    recall = sum(_matched(truth, found, margin) / len(truth) for truth in truths) / len(truths)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _matched(truth: Iterable[int], found: Iterable[int], margin: int) -> int:
    left = set(found)
    matched = 0
    for mark in sorted(truth):
        near = [(abs(mark - candidate), candidate) for candidate in left if abs(mark - candidate) <= margin]
        if near:
            left.remove(min(near)[1])
            matched += 1
    return matched


def cover(annotations: Sequence[Collection[int]], predicted: Iterable[int], length: int) -> float:
    """Covering in [0, 1] of the annotated segmentations of ``length`` observations by the predicted one."""
    segments = _segments(predicted, length)
    total = 0.0
    for marks in annotations:
        for begin, end in _segments(marks, length):
            best = 0.0
            for other_begin, other_end in segments:
                shared = min(end, other_end) - max(begin, other_begin)
                if shared > 0:
                    best = max(best, shared / (max(end, other_end) - min(begin, other_begin)))
            total += (end - begin) * best
    return total / (length * len(annotations))


def _segments(marks: Iterable[int], length: int) -> list[tuple[int, int]]:
    edges = sorted({0, length, *(mark for mark in marks if 0 < mark < length)})
    return list(pairwise(edges))
