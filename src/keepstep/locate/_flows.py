"""Which of NCCL's transfers stand still in a collective that all have entered (MegaTrace §III-C, algorithm 2)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from keepstep.core.summary import LinkState, RankState

_LEAST_S = 0.5  # without progress, from which on a transfer stands still (MegaTrace §IV)


@dataclass(frozen=True, slots=True)
class Flow:
    """A link that stands still, from ``rank`` to ``link.peer``."""

    rank: int
    link: LinkState

    def __str__(self) -> str:
        stands = f"{self.link.in_flight} steps in flight, none completed for {self.link.quiet_s:.0f} s"
        return f"rank {self.rank} to rank {self.link.peer}: {stands}"


def cut_links(states: Mapping[int, RankState], ranks: Collection[int]) -> list[Flow]:
    """Links on which the network has data and completes none, the longest first: all other ranks wait for these."""
    found = [
        Flow(rank, link)
        for rank in sorted(set(ranks) & set(states))
        for link in states[rank].links
        if link.at == "network" and link.quiet_s >= _LEAST_S
    ]
    return sorted(found, key=lambda flow: -flow.link.quiet_s)


def still_gpus(states: Mapping[int, RankState], ranks: Collection[int]) -> list[int]:
    """Ranks whose GPU neither fills nor empties a buffer, though it waits for no data."""
    still: list[int] = []
    for rank in sorted(set(ranks) & set(states)):
        stands = {link.at for link in states[rank].links if link.quiet_s >= _LEAST_S}
        if "gpu" in stands and not stands & {"sender", "network"}:
            still.append(rank)
    return still
