"""Offsets and drift between the clocks of nodes, from operations that several nodes took part in.

An operation that synchronises its members cannot end anywhere before it has started everywhere; a receive cannot
end before its send has started. Each operation so bounds the offset between two clocks from one or both sides, with
no assumption on delays. The bounds of many operations are intersected (Marzullo's algorithm, so that a mismatched
pair of samples is outvoted) and propagated from a reference node (shortest paths over difference constraints).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keepstep.core.node_clocks import ClockOffsets, NodeClock
from keepstep.core.summary import ClockSample
from keepstep.locate._constraints import Constraint, constraints_between_nodes, first_finite

Floats = npt.NDArray[np.float64]

MAX_DRIFT = 2e-4  # seconds per second; an undisciplined quartz and NTP's slewing together drift less
MOST_NODES, MOST_SAMPLES = 1024, 20_000  # compared at once at most, which takes about a second
_WINDOW_S = 300.0  # samples older than the newest by more are not used
_BUCKETS = 32  # into which samples are sorted by time, to estimate a drift
_GRID = 41  # drifts that are tried between two bounds
_MIN_SPAN_S = 5.0  # samples over a shorter time show no drift
_MAX_ROUNDS = 32  # rounds of propagation; longer chains of nodes are left with wider bounds


@dataclass(frozen=True, slots=True)
class SampledClocks:
    """The samples of a large job's nodes, compared only as far as asked: all of it would outlast the verdict."""

    samples: Mapping[str, Sequence[ClockSample]]  # samples by node name

    def among(self, nodes: Collection[str]) -> ClockOffsets | None:
        """These nodes' clocks, from the operations that they share; None for more than `MOST_NODES` nodes."""
        if len(nodes) > MOST_NODES:
            return None
        newest = max(MOST_SAMPLES // max(len(nodes), 1), 1)
        return estimate_offsets(
            {node: self.samples[node][-newest:] for node in sorted(nodes) if node in self.samples}
        )


@dataclass(frozen=True, slots=True)
class _Edge:
    """The offset between two nodes (``x[node] - x[hub]``) at one instant."""

    hub: str
    node: str
    estimate_s: float
    low_s: float
    high_s: float
    drift: float
    drift_bound: float


def estimate_offsets(samples: Mapping[str, Sequence[ClockSample]]) -> ClockOffsets:
    """The clocks of all nodes against one of them (the one that shares most operations, then the first by name).

    ``samples``: for each node the completed operations of its ranks, times in seconds on the node's own clock. Samples
    without a counterpart elsewhere are ignored. Only the newest five minutes are used, so that drift may be taken as
    constant.
    """
    recent = {node: _recent(rows) for node, rows in samples.items()}
    reference, pairs = constraints_between_nodes({node: rows for node, rows in recent.items() if rows})
    if not pairs:
        reference = reference or min(samples, default="")
        alone = {reference: NodeClock(0.0, 0.0, 0.0, 0.0, 0.0)} if reference else {}
        return ClockOffsets(reference, alone)
    newest = {node: max(row.end_s for row in rows) for node, rows in recent.items() if rows}
    coarse = _coarse_offsets(reference, pairs)
    at_reference_s = max(newest[node] + offset for node, offset in coarse.items())
    edges = [_fit(hub, node, rows, at_reference_s - coarse[node]) for (hub, node), rows in pairs.items()]
    clocks = _propagate(reference, edges, {n: at_reference_s - offset for n, offset in coarse.items()})
    return ClockOffsets(reference, clocks)


def _recent(rows: Sequence[ClockSample]) -> list[ClockSample]:
    """The samples near the newest one."""
    newest = max((row.end_s for row in rows), default=0.0)
    return [row for row in rows if row.end_s >= newest - _WINDOW_S]


def _coarse_offsets(
    reference: str, pairs: Mapping[tuple[str, str], Sequence[Constraint]]
) -> dict[str, float]:
    """Offsets without regard to drift: good enough to name one instant on all clocks. Pairs come hub first."""
    offsets = {reference: 0.0}
    for (hub, node), rows in pairs.items():
        if node not in offsets:
            offsets[node] = offsets[hub] + float(np.median([row.guess_s for row in rows]))
    return offsets


def _fit(hub: str, node: str, rows: Sequence[Constraint], at_s: float) -> _Edge:
    """The offset between two nodes at one instant (``at_s`` on the node's clock) that the operations allow."""
    age = np.array([row.time_s for row in rows]) - at_s
    low = np.array([row.low_s for row in rows])
    high = np.array([row.high_s for row in rows])
    middle = np.array([row.middle_s for row in rows])
    kept = np.ones(len(rows), dtype=np.bool_)
    fit = _feasible(age, low, high)
    if fit is None:
        slope = _slope(age, middle)
        flat_low, flat_high = low - slope * age, high - slope * age
        bottom, top, agreeing = _overlap(flat_low, flat_high)
        kept = (flat_low <= top) & (flat_high >= bottom)
        fit = _feasible(age[kept], low[kept], high[kept]) if 2 * agreeing > len(rows) else None
    if fit is None:
        fit = _Feasible(-math.inf, math.inf, -MAX_DRIFT, MAX_DRIFT)
    slope = min(max(_slope(age[kept], middle[kept]), fit.drift_low), fit.drift_high)
    ends = (middle - slope * age)[kept & np.isfinite(middle)]
    if len(ends):  # differences between nearly simultaneous ends: their median, kept within what is possible
        estimate = min(max(float(np.median(ends)), fit.low_s), fit.high_s)
    else:
        estimate = first_finite((fit.low_s + fit.high_s) / 2, fit.low_s, fit.high_s, rows[-1].guess_s)
    drift_bound = max(fit.drift_high - slope, slope - fit.drift_low)
    return _Edge(hub, node, estimate, fit.low_s, fit.high_s, slope, drift_bound)


@dataclass(frozen=True, slots=True)
class _Feasible:
    """The ranges of drifts, and of offsets at age 0, that no operation rules out."""

    low_s: float
    high_s: float
    drift_low: float
    drift_high: float


def _feasible(age: Floats, low: Floats, high: Floats) -> _Feasible | None:
    """Every line ``offset + drift * age`` between the bounds; None when there is none.

    For a given drift the possible offsets are one interval, and its length is concave in the drift: a grid, refined
    once around what is possible, is enough. Widened by a grid step, so that nothing possible is left out.
    """
    _, coarse = _scan(age, low, high, -MAX_DRIFT, MAX_DRIFT)
    left, right = max(coarse.drift_low, -MAX_DRIFT), min(coarse.drift_high, MAX_DRIFT)
    possible, fine = _scan(age, low, high, left, right)
    if not possible:
        return None
    slack = (fine.drift_high - fine.drift_low) / (_GRID - 1) * float(np.max(np.abs(age)))
    left, right = max(fine.drift_low, -MAX_DRIFT), min(fine.drift_high, MAX_DRIFT)
    return _Feasible(fine.low_s - slack, fine.high_s + slack, left, right)


def _scan(age: Floats, low: Floats, high: Floats, left: float, right: float) -> tuple[bool, _Feasible]:
    """Whether any drift of a grid is possible; and the possible ones, a step more on both sides, with their offsets.

    If no drift is possible, the one that comes nearest to it is taken.
    """
    drifts = np.linspace(left, right, _GRID)
    bottoms: Floats = np.max(low[None, :] - drifts[:, None] * age[None, :], axis=1)
    tops: Floats = np.min(high[None, :] - drifts[:, None] * age[None, :], axis=1)
    gaps = tops - bottoms
    possible = np.flatnonzero(gaps >= 0)
    here = possible if len(possible) else np.array([int(np.argmax(gaps))])
    step = (right - left) / (_GRID - 1)
    offsets = float(np.min(bottoms[here])), float(np.max(tops[here]))
    ends = float(drifts[here[0]]) - step, float(drifts[here[-1]]) + step
    return len(possible) > 0, _Feasible(*offsets, *ends)


def _slope(age: Floats, middle: Floats) -> float:
    """Drift by Theil and Sen over the medians of time buckets; 0 when there is too little to tell."""
    known = np.isfinite(middle)
    age, middle = age[known], middle[known]
    if len(age) < 8 or float(np.ptp(age)) < _MIN_SPAN_S:
        return 0.0
    parts = np.array_split(np.argsort(age), min(_BUCKETS, len(age) // 2))
    x = np.array([float(np.median(age[part])) for part in parts])
    y = np.array([float(np.median(middle[part])) for part in parts])
    first, second = np.triu_indices(len(x), 1)
    apart, grown = x[second] - x[first], y[second] - y[first]
    slopes = grown[apart > 0] / apart[apart > 0]
    return min(max(float(np.median(slopes)), -MAX_DRIFT), MAX_DRIFT) if len(slopes) else 0.0


def _overlap(low: Floats, high: Floats) -> tuple[float, float, int]:
    """The interval that most of the given intervals cover, and how many do (Marzullo 1984)."""
    edges = np.concatenate([low, high])
    closing = np.concatenate([np.zeros(len(low), dtype=np.int64), np.ones(len(high), dtype=np.int64)])
    order = np.lexsort((closing, edges))
    depth = np.cumsum(1 - 2 * closing[order])
    best = int(np.argmax(depth))
    return float(edges[order[best]]), float(edges[order[best + 1]]), int(depth[best])


def _propagate(reference: str, edges: Sequence[_Edge], at_s: Mapping[str, float]) -> dict[str, NodeClock]:
    """The clocks of all nodes that edges connect with the reference, their offsets bounded over all paths."""
    tree = _tightest_tree(reference, edges)
    index = {name: position for position, name in enumerate(tree)}
    usable = [edge for edge in edges if edge.hub in index and edge.node in index]
    hub = np.array([index[edge.hub] for edge in usable])
    node = np.array([index[edge.node] for edge in usable])
    lower = np.array([edge.low_s for edge in usable])
    upper = np.array([edge.high_s for edge in usable])
    low: Floats = np.full(len(tree), -math.inf)
    high: Floats = np.full(len(tree), math.inf)
    low[0] = high[0] = 0.0
    for _ in range(_MAX_ROUNDS):
        old_low, old_high = np.array(low), np.array(high)
        np.maximum.at(low, node, low[hub] + lower)
        np.minimum.at(high, node, high[hub] + upper)
        np.maximum.at(low, hub, low[node] - upper)
        np.minimum.at(high, hub, high[node] - lower)
        if np.array_equal(old_low, low) and np.array_equal(old_high, high):
            break
        if np.any(low > high):  # bounds around a cycle contradict each other: the last possible ones are kept
            low, high = old_low, old_high
            break
    clocks: dict[str, NodeClock] = {}
    for name, (estimate, drift, drift_bound) in tree.items():
        bottom, top = float(low[index[name]]), float(high[index[name]])
        offset = min(max(estimate, bottom), top)
        bound = max(top - offset, offset - bottom)
        clocks[name] = NodeClock(offset, drift, at_s[name], bound, drift_bound)
    return clocks


def _tightest_tree(reference: str, edges: Sequence[_Edge]) -> dict[str, tuple[float, float, float]]:
    """For each node offset, drift and drift bound, along the tightest edge from a node nearer to the reference."""
    into: dict[str, list[_Edge]] = {}
    for edge in edges:
        into.setdefault(edge.node, []).append(edge)
    tree = {reference: (0.0, 0.0, 0.0)}
    for node, candidates in into.items():  # nodes are in breadth-first order: hubs come before their nodes
        placed = [edge for edge in candidates if edge.hub in tree]
        if placed and node not in tree:
            best = min(placed, key=lambda edge: edge.high_s - edge.low_s)
            offset, drift, drift_bound = tree[best.hub]
            tree[node] = (offset + best.estimate_s, drift + best.drift, drift_bound + best.drift_bound)
    return tree
