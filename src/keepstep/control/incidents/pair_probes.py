"""After a failure of the network agents probe each other in pairs: who reaches whom now. Nothing waits for it.

Every node is probed with two others, as in ``keepstep check``, but with empty messages: the job may be training again.
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
        places = {name: place for place, name in enumerate(self.names)}
        ways: dict[tuple[int, int], PathProbe] = {}
        for one in probes:
            if one.source in places and one.target in places and one.source != one.target:
                ways[places[one.source], places[one.target]] = one
        pairs: list[Pair] = []
        for one, other in {(min(way), max(way)) for way in ways}:
            both = [ways[way] for way in ((one, other), (other, one)) if way in ways]
            lost = next((probe.outcome for probe in both if not probe.arrived), "")
            pairs.append(Pair(one, other, 1.0, lost))
        if not pairs:
            return ""
        judged = judge_pairs(self.names, sorted(pairs, key=lambda pair: (pair.one, pair.other)))
        lines = [one.text for one in judged.nodes] + list(judged.broken)
        if lines:
            more = f" (and {len(lines) - 2} more)" if len(lines) > 2 else ""
            return f"probed after it: {'; '.join(lines[:2])}{more}"
        count = f"{len(pairs)} pair{'s' if len(pairs) > 1 else ''}"
        return f"probed after it: the agents of {len(self.names)} nodes reach each other, in {count}"


def ask(cluster: Cluster, agents: Agents, lost: Collection[str], now_s: float) -> PairProbes | None:
    """Have pairs of nodes probed, without those that are lost; None where there are no two that can be."""
    here = [node.name for node in cluster.nodes.values() if node.agent is not None and node.name not in lost]
    names = tuple(sorted(here)[:MOST_NODES])
    pairs = [(names[one], names[other]) for chosen in first_rounds(len(names)) for one, other in chosen]
    number = agents.ask_probes(pairs, now_s) if pairs else None
    return PairProbes(number, names) if number is not None else None
