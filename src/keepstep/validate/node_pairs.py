"""Pairs of nodes, tested in rounds, and what they tell of a node. Pure.

Every node is tested with two others, its neighbours on a ring, so that the number of rounds does not grow with that of
nodes. A bad node between two good ones has two bad pairs, and so has a good one between two bad ones: second looks pair
each node without a good pair with one that has one. The second round of DLRover's network check is such a look.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from keepstep.core.validation import LinkFigure, Transfer
from keepstep.validate.judge_nodes import Stands
from keepstep.validate.plan import Pairs, ring_passes

MOST_ROUNDS, MOST_LOOKS = 4, 4  # first rounds, and rounds of second looks
_SLOW_SHARE = 0.5  # A node's best link is told as slow below this share of the nodes' median.
_UNFIT_SHARE = 0.2  # below it the node is unfit; links between racks are not as much slower than inside one
_LEAST_NODES = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """How two nodes, by their places, reached each other. ``trouble``: why they did not; "": they did."""

    one: int
    other: int
    bytes_per_s: float = 0.0  # in the slower direction
    trouble: str = ""

    @property
    def works(self) -> bool:
        """Whether data came through in both directions."""
        return not self.trouble


@dataclass(frozen=True, slots=True)
class PairsJudged:
    """``nodes``: those that stand out. ``broken``: a line for each link that does not work and is no such node's."""

    nodes: tuple[Stands, ...] = ()
    broken: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()  # links slower than other links of both their nodes


def first_rounds(count: int) -> tuple[Pairs, ...]:
    """Rounds in which each of so many nodes is tested with its two neighbours; no node is in two pairs of a round."""
    seen: set[frozenset[int]] = set()
    found: list[Pairs] = []
    for pairs in ring_passes(count):
        new = tuple(pair for pair in pairs if frozenset(pair) not in seen)
        seen.update(map(frozenset, new))
        found += [new] if new else []
    return tuple(found)


def second_looks(count: int, pairs: Iterable[Pair]) -> tuple[Pairs, ...]:
    """Further rounds: broken pairs once more, and nodes without a good pair with nodes that have one."""
    known = list(pairs)
    best = _best(known)
    doubted = [node for node in range(count) if node not in best]
    if len(best) >= _LEAST_NODES:
        doubted += _slow_nodes(best, _SLOW_SHARE)
    sound = [node for node in range(count) if node in best and node not in doubted]
    tried = {frozenset((pair.one, pair.other)) for pair in known}
    wanted = [(pair.one, pair.other) for pair in known if not pair.works]
    for number, node in enumerate(doubted):
        # Each doubted node gets another partner, as far as there are enough.
        turned = (sound[(number + step) % len(sound)] for step in range(len(sound)))
        partner = next((one for one in turned if frozenset((node, one)) not in tried), None)
        wanted += [(node, partner)] if partner is not None else []
    rounds: list[list[tuple[int, int]]] = []
    for pair in wanted:
        free = next((one for one in rounds if not {*pair} & {node for two in one for node in two}), None)
        if free is not None:
            free.append(pair)
        elif len(rounds) < MOST_LOOKS:
            rounds.append([pair])
    return tuple(map(tuple, rounds))


def transfers(number: int, pairs: Pairs) -> tuple[Transfer, ...]:
    """The transfers of a round: each pair in one direction, then in the other."""
    return (
        *(Transfer(2 * number, "ring", one, other) for one, other in pairs),
        *(Transfer(2 * number + 1, "ring", other, one) for one, other in pairs),
    )


def measured(
    pairs: Pairs, links: Iterable[LinkFigure], troubles: Mapping[int, Sequence[str]]
) -> tuple[Pair, ...]:
    """What a round found. ``troubles``: by place, what each node said of transfers that failed."""
    speeds: dict[tuple[int, int], float] = {}
    for link in links:
        if math.isfinite(link.bytes_per_s) and link.bytes_per_s > 0:
            key = link.source, link.target
            speeds[key] = max(speeds.get(key, 0.0), link.bytes_per_s)
    found: list[Pair] = []
    for one, other in pairs:
        ways = [speeds.get((one, other), 0.0), speeds.get((other, one), 0.0)]
        said = [text for node in (one, other) for text in troubles.get(node, ())]
        trouble = "" if all(ways) else said[0] if said else "no data came"
        found.append(Pair(one, other, min(ways), trouble))
    return tuple(found)


def merged(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """The best that was seen of each pair: a look that worked counts for more than one that did not."""
    best: dict[frozenset[int], Pair] = {}
    for pair in pairs:
        key = frozenset((pair.one, pair.other))
        if key not in best or (pair.works, pair.bytes_per_s) > (best[key].works, best[key].bytes_per_s):
            best[key] = pair
    return tuple(best.values())


def judge_pairs(names: Sequence[str], pairs: Iterable[Pair]) -> PairsJudged:
    """Who is to blame. A node is named only if all of its pairs are bad, of two at least, one with a sound node."""
    known = merged(pairs)
    best = _best(known)
    named: dict[int, Stands] = {}
    for node, name in enumerate(names):
        bad = [_partner(pair, node) for pair in known if node in (pair.one, pair.other) and not pair.works]
        if node not in best and len(bad) > 1 and any(one in best for one in bad):
            trouble = next(pair.trouble for pair in known if node in (pair.one, pair.other))
            text = (
                f"node {name}: no data between it and {' or '.join(names[one] for one in sorted(bad)[:4])} "
                f"({trouble}), which others reach; look at its interface, firewall and switch port"
            )
            named[node] = Stands(name, text, is_unfit=True)
    broken = [
        f"link {names[pair.one]} - {names[pair.other]}: no data ({pair.trouble}); "
        + (
            "both reach other nodes, look at the way between them"
            if pair.one in best and pair.other in best
            else "nothing says which of the two is at fault"
        )
        for pair in known
        if not pair.works and pair.one not in named and pair.other not in named
    ]
    if len(best) >= _LEAST_NODES:
        middle = _median(best)
        for node in _slow_nodes(best, _SLOW_SHARE):
            looks = [pair for pair in known if node in (pair.one, pair.other) and pair.works]
            if len(looks) < 2:
                continue
            text = (
                f"node {names[node]}: at most {best[node] / 1e6:.0f} MB/s with {len(looks)} other nodes, the median of "
                f"all nodes is {middle / 1e6:.0f}; look at its interface and switch port"
            )
            named[node] = Stands(names[node], text, is_unfit=best[node] < _UNFIT_SHARE * middle)
    slow = [
        f"link {names[pair.one]} - {names[pair.other]}: {pair.bytes_per_s / 1e6:.0f} MB/s, "
        "both are faster with others; look at the way between them"
        for pair in known
        if pair.works
        and {pair.one, pair.other}.isdisjoint(named)
        and pair.bytes_per_s < _SLOW_SHARE * min(best[pair.one], best[pair.other])
    ]
    return PairsJudged(tuple(named.values()), tuple(broken), tuple(slow))


def links_of(node: int, names: Sequence[str], pairs: Iterable[Pair]) -> Iterator[str]:
    """``gpu-2:1180``, MB/s, for each partner of a node; ``gpu-2:none`` where nothing came through."""
    for pair in merged(pairs):
        if node in (pair.one, pair.other):
            speed = f"{pair.bytes_per_s / 1e6:.0f}" if pair.works else "none"
            yield f"{names[_partner(pair, node)]}:{speed}"


def _best(pairs: Iterable[Pair]) -> dict[int, float]:
    """The speed of the best link of each node that has one that works."""
    best: dict[int, float] = {}
    for pair in pairs:
        if pair.works:
            for node in (pair.one, pair.other):
                best[node] = max(best.get(node, 0.0), pair.bytes_per_s)
    return best


def _median(best: Mapping[int, float]) -> float:
    return sorted(best.values())[len(best) // 2]


def _slow_nodes(best: Mapping[int, float], share: float) -> list[int]:
    middle = _median(best)
    return [node for node, speed in best.items() if speed < share * middle]


def _partner(pair: Pair, node: int) -> int:
    return pair.other if pair.one == node else pair.one
