"""A rank's part in a restore: its own cache, the agent's restore service, and the live state that is filled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from keepstep.checkpoint.memory.rank_slots import Offer, RankSlots
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.restore.filling import Filling
from keepstep.checkpoint.restore.restore_service import RestoreClient
from keepstep.checkpoint.restore.resume import Copied, Elsewhere
from keepstep.core.errors import CheckpointError

OWN_CACHE = "this node's cache"


class Restoring:
    """Carries out what `resume.Rank` describes for one rank. ``error`` is the reason when its state cannot be filled.

    Args:
        cache: the rank's slots.
        rank: number of the rank.
        world_size: ranks of the job.
        state: the state that is to be filled; None for `resume.begin`, which fills none.
        slots: how many slots the rank is to have.
        service: client of the agent's restore service; None when there are no sources besides the cache.
        elastic: whether `digest` is needed to find out if all ranks have the same state.
        required: whether other sources must answer, because they may have a state when all caches are empty.
        threads: number of threads that copy.
        left: memory that nobody uses any more; it may be put under what is brought back.
        say: prints a line for the operator.
    """

    def __init__(
        self,
        cache: RankSlots,
        rank: int,
        world_size: int,
        state: Any,
        *,
        slots: int,
        service: RestoreClient | None,
        required: bool,
        elastic: bool,
        threads: int,
        left: list[torch.UntypedStorage],
        say: Callable[[str], None],
    ) -> None:
        self._cache, self._rank, self._world_size, self._slots = cache, rank, world_size, slots
        self._service, self._required, self._threads, self._say = service, required, threads, say
        self._elastic, self._left = elastic, left
        self._state = state
        self._offers: dict[Key, Offer] = {}
        self._brought: dict[Key, str] = {}
        self._filling: Filling | None = None
        self._spoiled = False
        self.error: CheckpointError | None = None

    def own(self) -> frozenset[Key]:
        self._offers, refused = self._cache.offers(self._world_size)
        for line in refused:
            self._say(line)
        self._spoiled = bool(refused)
        return frozenset(self._offers)

    def begun(self) -> bool:
        return not self._spoiled and all(offer.header.first for offer in self._offers.values())

    def elsewhere(self) -> Elsewhere:
        if self._service is None:
            return Elsewhere()
        try:
            offered = self._service.offers(self._rank)
        except CheckpointError as error:
            if self._required:
                return Elsewhere(troubles=(str(error),))
            self._say(f"{error}; only {OWN_CACHE} is looked at")
            return Elsewhere(unsure=True)
        for line in offered.refused:
            self._say(line)
        for line in offered.troubles:
            self._say(f"{line}: what is there is not looked at")
        troubles, unsure = offered.troubles, bool(offered.troubles)
        return Elsewhere(
            offered.keys, offered.incarnation, offered.refused, troubles if self._required else (), unsure
        )

    def bring(self, key: Key) -> None:
        if self._service is None:
            raise CheckpointError("there is no source besides the node's cache")
        self._cache.make_way(key, [offer.slot for offer in self._offers.values()])
        try:
            brought = self._service.bring(self._rank, key, self._slots)
        except CheckpointError as error:
            self._say(f"rank {self._rank}: step {key.step} is passed over: {error}")
            raise
        finally:
            self._cache.reopen()  # a slot may have been replaced even when bringing the state failed
        for line in brought.passed:
            self._say(f"rank {self._rank}: not restored from {line}")
        self._brought[key] = brought.where
        if key not in self.own():
            raise CheckpointError(f"step {key.step} of {brought.where} is not in the cache after all")

    def copy(self, key: Key) -> Copied:
        offer = self._offers[key]
        slot = self._cache.slots[offer.slot]
        if not slot.lock(shared=True):
            self.error = CheckpointError(
                f"rank {self._rank}: its snapshot is being written by another process"
            )
            return Copied.IMPOSSIBLE
        try:
            self._filling = Filling(self._state, offer.header, slot.memory, self._threads, self._left)
            self._filling.copy()
        except CheckpointError as error:
            self.error = error
            return Copied.IMPOSSIBLE
        finally:
            slot.unlock()
        if self._filling.damaged:
            self._say(f"the snapshot of rank {self._rank} at step {key.step} is damaged, not restored")
            return Copied.DAMAGED
        return Copied.WELL

    def drop(self, key: Key) -> None:
        self._cache.drop(self._offers.pop(key).slot)

    def wanted(self, key: Key) -> bool:
        return key in self._cache.wanted()

    def digest(self, key: Key) -> int:
        return self._cache.digest(key) if self._elastic else 0

    def source(self, key: Key) -> str:
        """Name of the source that the state came from."""
        return self._brought.get(key, OWN_CACHE)

    def finish(self) -> None:
        """Fill in everything but the copied bytes, once those of all ranks are known to be sound."""
        assert self._filling
        self._filling.finish()
