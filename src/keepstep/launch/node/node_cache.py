"""The node's cache as its launcher keeps it: made once, named to the workers, held until storage has everything."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from keepstep.core.errors import KeepstepError, UsageError
from keepstep.core.regular_files import read_regular
from keepstep.launch.command.placement import (
    CACHE,
    CHECKPOINT_DIR,
    CHECKPOINT_EVERY,
    ELASTIC,
    FAILURES_PER_DAY,
    INCARNATION,
    LAYOUT,
    NO_CACHE,
    Place,
)
from keepstep.launch.local_run import LocalRun

if TYPE_CHECKING:
    from keepstep.checkpoint.memory.cache import Cache
    from keepstep.checkpoint.memory.cache_server import CacheServer
    from keepstep.checkpoint.memory.slots import Key
    from keepstep.checkpoint.storage.in_use import FolderLock

_POLL_S = 0.1
_BRIEF_S = 2.0  # what is waited for less long is not worth a line
_LOOK_S = 0.02
_MOST_JSON_BYTES = 1 << 20
_BACKUPS = "backups: "  # how the agent's lines begin that are not about storage
_ALONE_S = 10.0  # for so long at least a step is waited for that other nodes may have, too
_MOST_UNLIKE = 4
"""Sealed steps without one that is the same on all ranks before none is expected; it is known a step later."""


class _Enough:
    """Whether enough is on storage, where nodes that ended at unlike steps bring several of their newest there."""

    def __init__(self, newest: Sequence[Key], now_s: float) -> None:
        """``newest``: of this node; other nodes lack some of these, as long as one of them ran behind or ahead."""
        self._left, self._since_s, self._late_s = list(newest), now_s, now_s
        self._there: Key | None = None

    def is_there(self, wanted: Sequence[Key], now_s: float) -> bool:
        """Whether no newer one of them can be on storage than is there. ``wanted``: those that are not."""
        if done := set(self._left).difference(wanted):
            self._there = max(done)
            self._late_s = now_s + max(_ALONE_S, 2 * (now_s - self._since_s))
            self._left, self._since_s = [key for key in self._left if key in wanted], now_s
        if self._there is None:
            return False
        return now_s >= self._late_s or not self._left or self._there > self._left[-1]


class NodeCache:
    """A cache that outlives the workers, from the first start on."""

    def __init__(self, run: LocalRun) -> None:
        self._run, self._job = run, run.job
        self._made: tuple[Cache, CacheServer] | None = None
        self._lock: FolderLock | None = None
        self._node_rank = 0
        self.moved = False  # this node plays other ranks than before, whose snapshots are still elsewhere

    @property
    def address(self) -> str:
        """The address of the cache; "": there is none."""
        return self._made[1].address if self._made else ""

    def environment(self, place: Place) -> dict[str, str]:
        """Variables by which workers find the cache or, when none can be made, learn why.

        Raises UsageError when another run uses the folder of the checkpoints.
        """
        job, self._node_rank = self._job, place.node_rank
        self._take_folder(place)
        try:
            if self._made is None:
                self._made = self._make(place)
        except (KeepstepError, OSError, ImportError) as error:
            self._run.warn(f"no checkpoints are kept in memory: {error}")
            return {NO_CACHE: f"{job.node} has no cache, none could be made: {error}"}
        found = {CACHE: self.address, INCARNATION: str(place.incarnation)}
        if job.elastic:
            found[ELASTIC] = "1"
        if job.layout:
            found[LAYOUT] = job.layout
        if job.persisting:
            every = job.persisting.every
            found[CHECKPOINT_DIR] = job.persisting.where
            found[CHECKPOINT_EVERY] = "auto" if every is None else str(every)
            found[FAILURES_PER_DAY] = f"{job.persisting.failures_per_day:g}"
        return found

    async def stored(self, wait_s: float, in_vain: Callable[[], bool], *, last: int) -> str:
        """Wait until all is on storage, or ``in_vain()``; returns a line about what is not, else "".

        ``last``: so many of the newest steps that all ranks of this node have belong there, too; where only those do
        that the script asks for, they do so if one of them was put off. Of several, one that other nodes have as well
        is enough. What keeps steps from storage is said by the agent once, which may be long ago: that a step is waited
        for, and that it is lost, is said all the same.
        """
        if self._made is None or self._job.persisting is None:
            return ""
        from keepstep.checkpoint.memory.cache_server import PUT_OFF, STORAGE_TROUBLE

        if last and (self._job.persisting.every != 0 or self._made[1].claimed(PUT_OFF)):
            self._made[0].want_newest(last)

        where, begun_s, said = self._job.persisting.where, time.monotonic(), False
        enough = _Enough(self._made[0].wanted()[-last:] if last > 1 else [], begun_s)
        while (wanted := self._made[0].wanted()) and not enough.is_there(wanted, time.monotonic()):
            steps = ", ".join(str(key.step) for key in wanted)
            if in_vain() or time.monotonic() >= begun_s + wait_s:
                # Keeps the agent from saying now that training goes on without storage.
                self._made[1].claim(STORAGE_TROUBLE)
                lost = f"step {steps} is not on storage {where} and is lost"
                return lost if self._made[1].claim(lost) else ""
            if not said and time.monotonic() - begun_s > _BRIEF_S:
                said = True
                until = f"at most {wait_s:.0f} s (Ctrl-C: no longer)"
                self._run.say(
                    f"waiting for step {steps} to be on storage {where}, {until}{self._in_the_way()}"
                )
            await asyncio.sleep(_POLL_S)
        return ""

    def _in_the_way(self) -> str:
        """What keeps steps from storage by the agent's status file, behind a colon; "": nothing is known of."""
        path = self._run.folder / "nodes" / str(self._node_rank) / "checkpoints.json"
        try:
            troubles: list[str] = json.loads(read_regular(path, _MOST_JSON_BYTES))["troubles"]
            return next((f": {line}" for line in troubles if not line.startswith(_BACKUPS)), "")
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return ""  # not there yet, or edited

    def newest(self, rank: int) -> Key | None:
        """The newest snapshot that a rank of this node has sealed."""
        return self._made[0].newest(rank) if self._made else None

    def newest_alike(self, rank: int) -> Key | None:
        """The newest snapshot of a rank of this node that is the same on all ranks of the job."""
        return max(self._made[0].alike(rank), default=None) if self._made else None

    async def next_sealed(
        self, place: Place, over: Callable[[], bool], *, alike: bool, leave: bool
    ) -> tuple[int | None, str]:
        """The step of `next_step` for this node; where that is -1, also why there is no such step.

        ``leave``: the ranks are to leave this node, for which it may have too little memory.
        """
        ranks = range(place.first_rank, place.first_rank + self._job.nproc)
        if leave and (why := self._cramped(ranks)):
            return -1, why
        step = await self.next_step(ranks, over, alike=alike)
        return step, self.rigid(place) if step is not None and step < 0 else ""

    async def next_step(self, ranks: Sequence[int], over: Callable[[], bool], *, alike: bool) -> int | None:
        """Wait for the next step that all ``ranks`` have sealed; None once ``over``.

        ``alike``: only a step whose state is the same on all ranks of the job counts. -1: some rank has never sealed
        any step, or several steps have passed without such a one.
        """
        look = self.newest_alike if alike else self.newest
        first, seen = {rank: look(rank) for rank in ranks}, {self.newest(ranks[0])}
        if not self.moved and not all(self.newest(rank) for rank in ranks):
            return -1
        while not over():
            newest = [look(rank) for rank in ranks]
            if all(key is not None and key != first[rank] for rank, key in zip(ranks, newest, strict=True)):
                return min(key.step for key in newest if key is not None)
            seen.add(self.newest(ranks[0]))
            if alike and len(seen) > _MOST_UNLIKE:
                return -1
            await asyncio.sleep(_LOOK_S)
        return None

    def _cramped(self, ranks: Iterable[int]) -> str:
        """Why this node cannot play other ranks and keep the snapshots of these until another node has them."""
        if self._made is None:
            return ""
        from keepstep.checkpoint.memory.cache import gib

        lacks = self._made[0].lacks(ranks)
        there = "lacks {} to keep what its ranks leave there until others have it; raise KEEPSTEP_CHECKPOINT_BYTES"
        return there.format(gib(lacks)) if lacks else ""

    def rigid(self, place: Place | None) -> str:
        """Why this node's ranks cannot go on in a job of another size; "": nothing is in the way.

        Ranks that have saved nothing here are no obstacle: they begin as their script does.
        """
        first = place.first_rank if place else 0
        saved = [rank for rank in range(first, first + self._job.nproc) if self.newest(rank)]
        if not saved or any(self.newest_alike(rank) for rank in saved):
            return ""
        return f"what rank {saved[0]} saves is not known to be the same on all ranks (docs/howto/session.md)"

    def move(self, before: Place, after: Place) -> None:
        """Keep of the snapshots what is still of use, because the job has another size, or this node other ranks."""
        if self._made is None:
            return
        from keepstep.checkpoint.memory.slot import backup_of

        ranks = range(before.first_rank, before.first_rank + self._job.nproc)
        if after.world_size == before.world_size:
            self._made[0].leave(ranks)
            self.moved = any(self._made[0].slots(backup_of(rank)) for rank in ranks)
        else:
            self._made[0].renumber({rank: rank - before.first_rank + after.first_rank for rank in ranks})

    def _take_folder(self, place: Place) -> None:
        """Keep other runs out of the folder of the checkpoints, for all nodes of this one."""
        if self._job.persisting is None or place.node_rank or self._lock:
            return
        from keepstep.checkpoint.storage.in_use import lock_folder

        who = f"the run {self._run.folder} (process {os.getpid()} on {os.uname().nodename})"
        try:
            self._lock = lock_folder(self._job.persisting.where, who)
        except UsageError:
            if not place.incarnation:  # later, it is a launcher of this very job that still ends
                raise

    def close(self) -> None:
        """Let go of the cache."""
        if self._lock:
            self._lock.close()
            self._lock = None
        if self._made:
            cache, server = self._made
            server.close()
            cache.close()
            self._made = None

    def _make(self, place: Place) -> tuple[Cache, CacheServer]:
        from keepstep.checkpoint.memory.cache import Backing, Cache, default_limit_bytes
        from keepstep.checkpoint.memory.cache_server import CacheServer

        copies = self._job.checkpoint_backups if self._job.watch else 0
        nodes = self._job.max_nodes if self._job.elastic else place.node_count
        backing = Backing(self._job.nproc, min(copies, nodes - 1))
        cache = Cache(self._job.checkpoint_bytes or default_limit_bytes(), backing)
        try:
            return cache, CacheServer(cache, self._run.warn)
        except BaseException:
            cache.close()
            raise
