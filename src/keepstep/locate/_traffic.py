"""Finds the pair of nodes between which a collective over many nodes is slow, by the speed of its connections."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median

from keepstep.core.summary import PeerTraffic

MIN_DROP = 1.5  # factor by which a slow path lost speed, and lost more than any other path
_LEAST_BYTES = 65536  # fewer bytes, before or after, show no speed
_LEAST_BUSY_SHARE = 0.25  # part of the time since the onset; a path that is used less slows nobody


@dataclass(frozen=True, slots=True)
class SlowPath:
    """A path from one node to another, and its speed in bytes per second, healthy and now."""

    source: str
    target: str
    before_Bps: float
    after_Bps: float
    others_drop: float  # factor by which the median of the other paths lost speed: 1 for nothing
    over: str = "TCP"

    @property
    def drop(self) -> float:
        return self.before_Bps / self.after_Bps

    def __str__(self) -> str:
        speeds = f"{_rate(self.before_Bps)} -> {_rate(self.after_Bps)}"
        others = f"other paths x{1 / self.others_drop:.2f}"
        return f"{self.source} to {self.target}: {self.over} sends at {speeds}; {others}"


def slowest_path(traffic: Sequence[PeerTraffic], among: Collection[str]) -> SlowPath | None:
    """The one pair among the nodes whose connections became slower than all others'; None when none stands out.

    The two directions of a pair count as one: often both are slow. Without a second pair there is nothing to compare
    with, and nobody is named. What NCCL counts comes first: it is the training's own data.
    """
    for over in ("NCCL", "TCP"):
        found = _slowest([one for one in traffic if one.over == over], among)
        if found is not None:
            return replace(found, over=over)
    return None


def _slowest(traffic: Sequence[PeerTraffic], among: Collection[str]) -> SlowPath | None:
    node_of = {one.source: one.node for one in traffic}
    sums: dict[tuple[str, str], list[float]] = {}
    length_s = 0.0
    for one in traffic:
        target = node_of.get(one.target, "")
        if target == one.node or target not in among or one.node not in among:
            continue
        figures = one.before_bytes, one.before_busy_s, one.after_bytes, one.after_busy_s
        known = sums.get((one.node, target), (0.0,) * 4)
        sums[one.node, target] = [total + figure for total, figure in zip(known, figures, strict=True)]
        length_s = max(length_s, one.after_s)
    worst: dict[tuple[str, str], tuple[SlowPath, float]] = {}
    for (source, target), (bytes0, busy0, bytes1, busy1) in sums.items():
        if min(bytes0, bytes1) < _LEAST_BYTES or min(busy0, busy1) <= 0:
            continue
        path = SlowPath(source, target, bytes0 / busy0, bytes1 / busy1, 1.0)
        pair = (min(source, target), max(source, target))
        if pair not in worst or path.drop > worst[pair][0].drop:
            worst[pair] = path, busy1
    if len(worst) < 2:
        return None
    path, busy_s = worst.pop(max(worst, key=lambda one: worst[one][0].drop))
    others = [other.drop for other, _ in worst.values()]
    if path.drop < MIN_DROP * max(max(others), 1.0) or busy_s < _LEAST_BUSY_SHARE * length_s:
        return None
    return replace(path, others_drop=max(median(others), 1e-9))


def _rate(bytes_per_s: float) -> str:
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
