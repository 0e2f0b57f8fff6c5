"""Waiting until all workers of this node have sealed one more step in its cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from keepstep.launch.caching import Caching

_LOOK_S = 0.02
_MOST_UNLIKE = 4  # steps: whether one was the same on all ranks is known a step later


async def next_sealed(
    caching: Caching, ranks: Iterable[int], over: Callable[[], bool], *, alike: bool = False
) -> int | None:
    """The step that all ``ranks`` have sealed since now; None once ``over``.

    ``alike``: one that is the same on all ranks of the job. -1: some rank has never sealed any, or none like that in
    several steps.
    """
    ranks = tuple(ranks)
    look = caching.newest_alike if alike else caching.newest
    first, seen = {rank: look(rank) for rank in ranks}, {caching.newest(ranks[0])}
    if not caching.moved and not all(caching.newest(rank) for rank in ranks):
        return -1
    while not over():
        newest = [look(rank) for rank in ranks]
        if all(key is not None and key != first[rank] for rank, key in zip(ranks, newest, strict=True)):
            return min(key.step for key in newest if key is not None)
        seen.add(caching.newest(ranks[0]))
        if alike and len(seen) > _MOST_UNLIKE:
            return -1
        await asyncio.sleep(_LOOK_S)
    return None
