"""Waiting until all workers of this node have sealed one more step in its cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keepstep.launch.caching import Caching

_LOOK_S = 0.02


async def next_sealed(caching: Caching, ranks: Iterable[int], over: Callable[[], bool]) -> int | None:
    """The step that all ``ranks`` have sealed since now; -1 when one has never sealed any; None once ``over``."""
    ranks = tuple(ranks)
    first = {rank: caching.newest(rank) for rank in ranks}
    if not all(first.values()):
        return -1
    while not over():
        newest = [caching.newest(rank) for rank in ranks]
        if all(key is not None and key != first[rank] for rank, key in zip(ranks, newest, strict=True)):
            return min(key.step for key in newest if key is not None)
        await asyncio.sleep(_LOOK_S)
    return None
