"""What probes and the kernel's counters say about the paths between nodes: broken, held up, slow or sound.

After MegaTrace §III-C: a path is the first suspect when a message needs longer than a guard time of 500 ms, or when it
has lost 20 % of its throughput.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from keepstep.core.incident import Diagnosis
from keepstep.core.ranges import fold_nodes
from keepstep.core.summary import PathProbe, PeerTraffic

GUARD_S = 0.5  # round trip of a probe from which on a path is slow
_DROP = 0.2  # part of a path's throughput; losing more holds up its data
_LEAST_BUSY_S = 1.0  # data that has been under way for a shorter time shows nothing
_LEAST_BUSY_SHARE = 0.25  # part of the time since the onset in which data must have been under way
_LEAST_BYTES = 65536  # fewer bytes before the onset show no speed
_ALL_PAIRS_NODES = 6  # among more nodes only neighbours are probed: rings run between them
_MOST_PAIRS = 64
_TOLD = {
    "silent": "its host answers, its agent does not",
    "refused": "its host answers, its agent is gone",
    "unreachable": "no route",
}

Condition = Literal["broken", "held up", "slow", "sound", "unknown"]
Pair = tuple[str, str]


class Paths:
    """All that is known about paths. A pair of nodes may be given in either order.

    ``addresses``: node name by address, of nodes that reported no traffic of their own.
    """

    def __init__(
        self,
        probes: Sequence[PathProbe] = (),
        traffic: Sequence[PeerTraffic] = (),
        addresses: Mapping[str, str] | None = None,
    ) -> None:
        self._probes: dict[frozenset[str], list[PathProbe]] = {}
        for probe in probes:
            self._probes.setdefault(frozenset((probe.source, probe.target)), []).append(probe)
        node_of = {**(addresses or {}), **{one.source: one.node for one in traffic}}
        self._held: dict[frozenset[str], list[str]] = {}
        for one in traffic:
            target = node_of.get(one.target, "")
            line = _held_up(one, target) if target and target != one.node else ""
            if line:
                self._held.setdefault(frozenset((one.node, target)), []).append(line)

    def condition(self, pair: Pair) -> Condition:
        """The state of a path.

        ``broken``: a probe did not come back. ``held up``: data is under way and too little of it arrives.
        """
        probes = self.between(pair)
        if not all(probe.arrived for probe in probes):
            return "broken"
        if self.holds_up(pair):
            return "held up"
        if any(probe.round_trip_s >= GUARD_S for probe in probes):
            return "slow"
        return "sound" if probes else "unknown"

    def holds_up(self, pair: Pair) -> bool:
        """Whether data is under way there and too little of it arrives, by the kernel's counters."""
        return frozenset(pair) in self._held

    def between(self, pair: Pair) -> list[PathProbe]:
        """The probes between the two nodes, in both directions."""
        return self._probes.get(frozenset(pair), [])

    def bad(self, pairs: Iterable[Pair]) -> list[Pair]:
        """The pairs that are in the worst condition of all given ones; empty when none is bad."""
        found = [(self.condition(pair), pair) for pair in pairs]
        for condition in ("broken", "held up", "slow"):
            if worst := [pair for its, pair in found if its == condition]:
                return worst
        return []

    def all_sound(self, pairs: Collection[Pair]) -> bool:
        """Whether there are pairs and all of them are sound."""
        return bool(pairs) and all(self.condition(pair) == "sound" for pair in pairs)

    def lines(self, pairs: Sequence[Pair]) -> tuple[str, ...]:
        """Lines of evidence: one for every pair that is not sound, and one for all that are."""
        told: list[str] = []
        sound: list[Pair] = []
        for pair in pairs:
            probes = self.between(pair)
            its = self.condition(pair)
            if probes and its != "sound":
                first, *rest = sorted(probes, key=lambda one: (one.source, one.target))
                back = "".join(f"; back: {_outcome(one)}" for one in rest[:1])
                told.append(f"probe {first.source} to {first.target}: {_outcome(first)}{back}")
            elif its == "sound":
                sound.append(pair)
            told += self._held.get(frozenset(pair), [])[:2]
        if sound:
            probes = [probe for pair in sound for probe in self.between(pair)]
            longest_ms = max(probe.round_trip_s for probe in probes) * 1e3
            names = fold_nodes({node for pair in sound for node in pair})
            which = f"of the other paths looked at ({len(sound)})" if told else f"between {names}"
            told.append(f"probes {which} came back within {longest_ms:.1f} ms")
            told += [f"{one.target}: {_outcome(one)}" for one in probes if one.outcome in _TOLD][:2]
        return tuple(told)


def _held_up(one: PeerTraffic, target: str) -> str:
    """A line on a connection whose data does not get through, by its counters; empty when it does."""
    busy_s = one.after_busy_s
    if busy_s < max(_LEAST_BUSY_S, _LEAST_BUSY_SHARE * one.after_s):
        return ""
    way = f"{one.node} to {target}: {one.over} has had data under way for {busy_s:.0f} s"
    if one.after_bytes == 0:
        return f"{way}, nothing of it arrived"
    if one.before_busy_s <= 0 or one.before_bytes < _LEAST_BYTES:
        return ""
    left = (one.after_bytes / busy_s) / (one.before_bytes / one.before_busy_s)
    return f"{way}, at {left:.1%} of its speed before" if left <= 1 - _DROP else ""


def with_probes(diagnosis: Diagnosis, probes: Sequence[PathProbe]) -> Diagnosis:
    """The diagnosis with what probes of the blamed links show; a link that fails them is blamed for sure."""
    paths = Paths(probes)
    links = [culprit.link.nodes for culprit in diagnosis.culprits if culprit.link is not None]
    bad = set(paths.bad(links))
    culprits = tuple(
        replace(one, confidence="high") if one.link is not None and one.link.nodes in bad else one
        for one in diagnosis.culprits
    )
    lines = [line for line in paths.lines(links) if line not in diagnosis.evidence]
    return replace(diagnosis, culprits=culprits, evidence=(*diagnosis.evidence, *lines))


def pairs_among(nodes: Sequence[str], around: Collection[str] = ()) -> list[Pair]:
    """The pairs of nodes to look at: all pairs of a few nodes, neighbours in the given order among many.

    ``around``: if not empty, only pairs with one of these nodes are taken.
    """
    distinct = list(dict.fromkeys(nodes))
    if len(distinct) <= _ALL_PAIRS_NODES:
        pairs = list(itertools.combinations(distinct, 2))
    else:
        pairs = list(zip(distinct, [*distinct[1:], distinct[0]], strict=True))
    if around:
        pairs = [pair for pair in pairs if pair[0] in around or pair[1] in around]
    return pairs[:_MOST_PAIRS]


def common_node(pairs: Sequence[tuple[str, ...]]) -> str:
    """The node that several pairs have in common; empty when there is none."""
    common = set(pairs[0]).intersection(*pairs[1:]) if len(pairs) > 1 else set[str]()
    return common.pop() if len(common) == 1 else ""


def _outcome(probe: PathProbe) -> str:
    """The outcome of a probe in words."""
    if probe.outcome == "timeout":
        return f"no answer in {probe.round_trip_s:.1f} s"
    return _TOLD.get(probe.outcome, f"answer after {probe.round_trip_s * 1e3:.1f} ms")
