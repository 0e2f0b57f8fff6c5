"""The agent's part in checkpoints: it restores states for its node's workers and writes wanted steps to storage.

All this runs in threads of its own, because storage and network may take any time, and the agent's polls must not wait.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keepstep.agent.services.node_backups import NeighbourSource, NodeBackups, unexpected
from keepstep.agent.services.ordered_step import OrderedStep
from keepstep.checkpoint.memory.cache_server import STORAGE_TROUBLE, claim
from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.memory.incoming import StateSource
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.restore.restore_service import RestoreServer, RestoreService, restore_address
from keepstep.checkpoint.storage.backend import open_storage
from keepstep.checkpoint.storage.manifest import key_text
from keepstep.checkpoint.storage.persist import Persister
from keepstep.checkpoint.storage.persist_plan import PersistPlan
from keepstep.checkpoint.storage.source import StorageSource
from keepstep.core.errors import CheckpointError
from keepstep.core.own_folders import write_whole
from keepstep.wire.messages import MOST_NOTICES, KeptSteps, Message, Persist

logger = logging.getLogger("keepstep.agent")

FILE = "checkpoints.json"  # name of the status file in the node's folder of the run
_MEND = (
    "training goes on, and it is tried again: mend that, or start again with another --checkpoint-dir. "
    "At its end the run waits for what is not there (checkpoint_wait_s; Ctrl-C: no longer), then it is lost"
)
_MOST_TEXT = 500  # characters of a line that others are told
_LOOK_S = 0.25
_TELL_S = 1.0
_STOP_S = 0.2


@dataclass(frozen=True, slots=True)
class Place:
    """Where the node's snapshots are and where they go.

    Attributes:
        cache: address of the node's cache.
        ranks: ranks that run on this node.
        node_rank: rank of this node; node 0 writes manifests and removes old steps.
        world_size: number of ranks in the job.
        folder: this node's folder inside the run's folder.
        storage: path or URL of the storage; "": none.
        keep: how many complete steps stay on storage; 0: all.
    """

    cache: str
    ranks: tuple[int, ...]
    node_rank: int
    world_size: int
    folder: Path
    storage: str = ""
    keep: int = 0


class Checkpoints:
    """Restore service and persister of one node. If there are ``backups``, other nodes are asked before storage."""

    def __init__(
        self,
        place: Place,
        backups: NodeBackups | None = None,
        send: Callable[[Message], None] = lambda message: None,
    ) -> None:
        """``send`` takes messages for the controller. Raises KeepstepError if the storage cannot be used here."""
        self._place, self._backups = place, backups
        self.states = backups.states if backups else CachedStates(place.cache, place.ranks)
        sources: list[StateSource] = [NeighbourSource(backups)] if backups else []
        self._persister: Persister | None = None
        if place.storage:
            storage = open_storage(place.storage)
            sources.append(StorageSource(storage, place.world_size))
            plan = PersistPlan(place.ranks, leader=place.node_rank == 0, seed=place.node_rank)
            self._persister = Persister(plan, storage, self.states.source, world_size=place.world_size)
        service = RestoreService(place.ranks, sources, self.states)
        self._service = RestoreServer(restore_address(place.cache), service)
        self._ordered = OrderedStep(
            self.states, place.ranks, place.node_rank, send, has_storage=bool(place.storage)
        )
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keepstep-checkpoints", daemon=True)
        self._declared: tuple[frozenset[Key], bool] = (frozenset(), False)
        self._told: tuple[list[Key], Key | None, list[str]] | None = None
        self._tell_s = 0.0
        self.kept = KeptSteps()  # the newest steps that are kept; read from other threads
        self._look_at_kept_s = 0.0
        self._said = False  # whether the launcher was asked to say what keeps steps from storage

    def start(self) -> None:
        self._service.start()
        if self._persister:
            self._persister.start()
        self._thread.start()

    def stop(self) -> None:
        """Stop soon. A step whose writing is cut short stays in the cache, and the next agent writes it again."""
        self._service.stop()
        self._stopped.set()
        if self._persister:
            self._persister.stop(_STOP_S)
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def order(self, order: Persist) -> None:
        """Take an operator's order to bring a step to storage; it is carried out at the next look."""
        self._ordered.take(order)

    def look(self) -> None:
        """Order newly sealed steps to be written, and release the cached steps that are on storage."""
        self._look_at_kept()
        if self._persister is None:
            self._ordered.look(None, {}, ())
            self._tell((), None)
            return
        for key, rank in self._persister.damaged():
            if self.states.drop(key, rank):
                logger.error("%s of rank %d is damaged in the cache, and given up", key_text(key), rank)
        wished = self.states.wished()
        whole = self._persister.whole
        self._ordered.look(whole, wished, self._persister.troubles())
        for key in sorted(key for key in wished if whole and key in whole):
            logger.info("%s is on storage %s", key_text(key), self._place.storage)
            self.states.release(key)
        ranks = set(self._place.ranks)
        pending = frozenset(key for key, ready in wished.items() if ready >= ranks) - (whole or frozenset())
        self._declare(pending, whole)
        self.states.pin(self._persister.follow(self.states.sealed()))
        self._say_trouble(self._persister.lasting_trouble())
        self._tell(pending, whole)

    def _look_at_kept(self) -> None:
        """Note, once a second, the newest steps that are kept of all ranks of the node."""
        if time.monotonic() < self._look_at_kept_s:
            return
        self._look_at_kept_s = time.monotonic() + _TELL_S
        held: list[frozenset[Key]] = []
        with suppress(CheckpointError):  # the cache has ended before the agent
            held = [self.states.held(rank) for rank in self._place.ranks]
        common = held[0].intersection(*held) if held else frozenset[Key]()
        sealed = max(common, default=None)
        stored = max(self._persister.whole or (), default=None) if self._persister else None
        troubles = self._persister.troubles()[:MOST_NOTICES] if self._persister else []
        self.kept = KeptSteps(
            sealed.step if sealed else -1,
            stored.step if stored else -1,
            tuple(line[:_MOST_TEXT] for line in troubles),
        )

    def _say_trouble(self, trouble: str) -> None:
        """Have the launcher say, once in a job, what keeps steps from storage."""
        if trouble and not self._said:
            self._said = True
            claim(self._place.cache, STORAGE_TROUBLE, f"{trouble}; {_MEND}")

    def _declare(self, pending: frozenset[Key], whole: frozenset[Key] | None) -> None:
        """Tell the persister which steps belong on storage; others are removed once it knows what is there."""
        assert self._persister
        stay = frozenset(sorted(whole or (), reverse=True)[: self._place.keep])
        declared = (pending | stay, bool(self._place.keep) and whole is not None)
        if declared != self._declared:
            self._persister.want(declared[0], remove_others=declared[1])
            self._declared = declared

    def _run(self) -> None:
        complaint = ""
        while not self._stopped.is_set():
            try:
                self.look()
                complaint = ""
            except Exception as error:  # the cache ended before the agent, or memory or descriptors ran out
                if str(error) != complaint:
                    logger.warning("checkpoints: %s", error, exc_info=unexpected(error))
                complaint = str(error)
                pending = self._told[0] if self._told else ()
                self._tell(pending, self._persister.whole if self._persister else None, complaint)
            self._stopped.wait(_LOOK_S)

    def _tell(self, pending: Collection[Key], whole: Collection[Key] | None, failure: str = "") -> None:
        """Write the status file for `keepstep status`. ``failure``: why the cache cannot be read."""
        if time.monotonic() < self._tell_s:
            return
        troubles = [failure] if failure else []
        if self._backups and (trouble := self._backups.trouble()):
            troubles.append(f"backups: {trouble}")
        if self._persister:
            troubles += self._persister.troubles()
        told = (sorted(pending), max(whole or (), default=None), troubles)
        if told == self._told or not (self._told or self._persister or troubles):
            return
        self._told, self._tell_s = told, time.monotonic() + _TELL_S
        content = {
            "unix_s": time.time(),
            "storage": self._place.storage,
            "on_the_way": [key.step for key in told[0]],
            "newest": told[1].step if told[1] else None,
            "troubles": troubles,
        }
        path = self._place.folder / FILE
        try:
            write_whole(path, f"{json.dumps(content)}\n".encode())
        except OSError as error:  # such as a full disk
            logger.warning("%s: cannot be written: %s", path, error.strerror)
