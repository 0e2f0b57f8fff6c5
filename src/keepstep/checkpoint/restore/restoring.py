"""A rank's part in a restore: its own cache, the agent's restore service, and the live state that is filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from keepstep.checkpoint.memory.rank_slots import Offer, RankSlots
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.restore.filling import Filling
from keepstep.checkpoint.restore.restore_service import RestoreClient
from keepstep.checkpoint.restore.resume import Copied, Elsewhere
from keepstep.core.errors import CheckpointError, MisfitError

OWN_CACHE = "this node's cache"


@dataclass
class Restoring:
    """Carries out what `resume.Rank` describes for one rank. ``error`` is the reason when its state cannot be filled.

    ``refused`` has a line for each state that another source has and does not offer.

    Attributes:
        state: the state that is to be filled; None for `resume.begin`, which fills none.
        service: client of the agent's restore service; None when there are no sources besides the cache.
        required: whether other sources must answer, because they may have a state when all caches are empty.
        elastic: whether `digest` is needed to find out if all ranks have the same state.
        left: memory that nobody uses any more; it may be put under what is brought back.
    """

    cache: RankSlots
    world_size: int
    state: Any
    service: RestoreClient | None
    required: bool
    elastic: bool
    threads: int
    left: list[torch.UntypedStorage]
    say: Callable[[str], None]
    error: CheckpointError | None = None
    refused: tuple[str, ...] = ()
    _offers: dict[Key, Offer] = field(default_factory=dict[Key, Offer])
    _brought: dict[Key, str] = field(default_factory=dict[Key, str])
    _filling: Filling | None = None
    _spoiled: bool = False

    @property
    def number(self) -> int:
        return self.cache.rank

    def own(self) -> frozenset[Key]:
        self._offers, refused = self.cache.offers(self.world_size)
        for line in refused:
            self.say(line)
        self._spoiled = bool(refused)
        return frozenset(self._offers)

    def begun(self) -> bool:
        return not self._spoiled and all(offer.header.first for offer in self._offers.values())

    def doubted(self) -> Key | None:
        return self.cache.board.doubted()

    def elsewhere(self) -> Elsewhere:
        if self.service is None:
            return Elsewhere()
        try:
            offered = self.service.offers(self.cache.rank)
        except CheckpointError as error:
            if self.required:
                return Elsewhere(troubles=(str(error),))
            self.say(f"{error}; only {OWN_CACHE} is looked at")
            return Elsewhere(unsure=True)
        self.refused = offered.refused
        for line in offered.troubles:
            self.say(f"{line}: what is there is not looked at")
        troubles = offered.troubles if self.required else ()
        unsure = bool(offered.troubles)
        return Elsewhere(offered.keys, offered.incarnation, offered.refused, troubles, unsure)

    def bring(self, key: Key) -> None:
        if self.service is None:
            raise CheckpointError("there is no source besides the node's cache")
        self.cache.make_way(key, [offer.slot for offer in self._offers.values()])
        try:
            brought = self.service.bring(self.cache.rank, key, self.cache.count)
        except CheckpointError as error:
            self.say(f"rank {self.cache.rank}: step {key.step} is passed over: {error}")
            raise
        finally:
            self.cache.reopen()  # a slot may have been replaced even when bringing the state failed
        for line in brought.passed:
            self.say(f"rank {self.cache.rank}: not restored from {line}")
        self._brought[key] = brought.where
        if key not in self.own():
            raise CheckpointError(f"step {key.step} of {brought.where} is not in the cache after all")

    def copy(self, key: Key) -> Copied:
        offer = self._offers[key]
        slot = self.cache.slots[offer.slot]
        if not slot.lock(shared=True):
            self.error = CheckpointError(
                f"rank {self.cache.rank}: its snapshot is being written by another process"
            )
            return Copied.IMPOSSIBLE
        try:
            self._filling = Filling(self.state, offer.header, slot.memory, self.threads, self.left)
            self._filling.copy()
        except CheckpointError as error:
            self.error = MisfitError(
                f"{error}; build the state as it was saved, or start a new `keepstep run`, with another "
                "--checkpoint-dir or none"
            )
            return Copied.IMPOSSIBLE
        finally:
            slot.unlock()
        if self._filling.damaged:
            self.say(f"the snapshot of rank {self.cache.rank} at step {key.step} is damaged, not restored")
            return Copied.DAMAGED
        return Copied.WELL

    def moment(self, key: Key) -> int:
        return self._offers[key].header.moment

    def drop(self, key: Key) -> None:
        self.cache.drop(self._offers.pop(key).slot)

    def wanted(self, key: Key) -> bool:
        return key in self.cache.wanted()

    def digest(self, key: Key) -> int:
        return self.cache.digest(key) if self.elastic else 0

    def source(self, key: Key) -> str:
        """Name of the source that the state came from."""
        return self._brought.get(key, OWN_CACHE)

    def finish(self) -> None:
        """Fill in everything but the copied bytes, once those of all ranks are known to be sound."""
        assert self._filling
        self._filling.finish()
