"""At warm-up, and after a failure of the network, agents probe each other in pairs: who reaches whom.

Every node is probed with two others, as in ``keepstep check``, but with empty messages: the job may be training.
Nothing waits for it, and nothing is done because of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from keepstep.control.cluster import Cluster
from keepstep.control.incidents.agents import Agents
from keepstep.core.summary import PathProbe
from keepstep.validate.node_pairs import Pair, first_rounds, judge_pairs

MOST_NODES = 256


@dataclass(frozen=True, slots=True)
class PairProbes:
    """A question to agents about pairs of nodes. ``names``: of the nodes, in the order of their places."""

    number: int
    names: tuple[str, ...]

    def told(self, probes: Sequence[PathProbe]) -> str:
        """What the answers say, in one line; "" where nobody has answered."""
        pairs = self.pairs(probes)
        if not pairs:
            return ""
        lines = self.troubles(pairs)
        if lines:
            return f"probed after it: {first_of(lines)}"
        count = f"{len(pairs)} pair{'s' if len(pairs) > 1 else ''}"
        return f"probed after it: the agents of {len(self.names)} nodes reach each other, in {count}"

    def pairs(self, probes: Sequence[PathProbe]) -> list[Pair]:
        """The pairs that were probed, in order; of each the trouble in either direction."""
        places = {name: place for place, name in enumerate(self.names)}
        ways: dict[tuple[int, int], PathProbe] = {}
        for one in probes:
            if one.source in places and one.target in places and one.source != one.target:
                ways[places[one.source], places[one.target]] = one
        found: list[Pair] = []
        for one, other in sorted({(min(way), max(way)) for way in ways}):
            both = [ways[way] for way in ((one, other), (other, one)) if way in ways]
            lost = next((probe.outcome for probe in both if not probe.arrived), "")
            found.append(Pair(one, other, 1.0, lost))
        return found

    def troubles(self, pairs: Sequence[Pair]) -> list[str]:
        """A line for each node that nobody reaches, and for each other pair that does not reach each other."""
        judged = judge_pairs(self.names, pairs)
        return [one.text for one in judged.nodes] + list(judged.broken)


def first_of(lines: Sequence[str]) -> str:
    """The first two lines, and how many more there are."""
    more = f" (and {len(lines) - 2} more)" if len(lines) > 2 else ""
    return f"{'; '.join(lines[:2])}{more}"


def ask(
    cluster: Cluster, agents: Agents, lost: Collection[str], now_s: float, most: int = MOST_NODES
) -> PairProbes | None:
    """Have pairs of nodes probed, without those that are lost; None where there are no two that can be."""
    here = [node.name for node in cluster.nodes.values() if node.agent is not None and node.name not in lost]
    names = tuple(sorted(here)[:most])
    pairs = [(names[one], names[other]) for chosen in first_rounds(len(names)) for one, other in chosen]
    number = agents.ask_probes(pairs, now_s) if pairs else None
    return PairProbes(number, names) if number is not None else None
