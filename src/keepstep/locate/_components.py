"""Ranks that are connected, directly or through others."""

from __future__ import annotations

from collections.abc import Iterable


def lowest_connected(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """For each rank in the pairs, the lowest rank that it is connected with through pairs, or itself."""
    lower: dict[int, int] = {}

    def lowest(rank: int) -> int:
        while lower.setdefault(rank, rank) != rank:
            rank = lower[rank]
        return rank

    for pair in pairs:
        one, other = sorted(map(lowest, pair))
        lower[other] = one
    return {rank: lowest(rank) for rank in lower}
