"""A step that an operator wants on storage now: the order is written on the node's board, where its ranks see it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.memory.slots import Key
from keepstep.core.errors import CheckpointError
from keepstep.wire.messages import Message, Persist, Persisting, PersistState

logger = logging.getLogger("keepstep.agent")

_PACE_LOOKS = 16  # most looks over which the pace of saves is measured
_PACE_S = 0.6  # for so long at least
_NO_STORAGE = "there is no storage to bring it to: start the job with --checkpoint-dir"
_NO_SAVE = (
    "no rank has saved a checkpoint: the script has to use keepstep.Session or keepstep.checkpoint.save()"
)


class OrderedStep:
    """Such an order on one node. ``take`` may be called from any thread, ``look`` from one only."""

    def __init__(
        self,
        states: CachedStates,
        ranks: Sequence[int],
        node_rank: int,
        send: Callable[[Message], None],
        *,
        has_storage: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._states, self._ranks, self._node_rank = states, frozenset(ranks), node_rank
        self._send, self._has_storage, self._clock = send, has_storage, clock
        self._order = Persist(0)
        self._is_new = False
        self._told: Persisting | None = None
        self._saved: deque[tuple[float, Key]] = deque(
            maxlen=_PACE_LOOKS
        )  # newest saved steps at the last looks
        self._on_way: Key | None = None

    def take(self, order: Persist) -> None:
        """Take an order; one that is repeated is answered again. Number 0: nothing is ordered any more."""
        if order != self._order:
            self._on_way = None
        self._order, self._told, self._is_new = order, None, True

    def look(
        self,
        whole: Collection[Key] | None,
        wished: Mapping[Key, set[int]],
        troubles: Sequence[str],
    ) -> None:
        """Carry the order out, and tell how far it is.

        Args:
            whole: steps that are whole on storage; None: there is no storage, or it was not listed yet.
            wished: steps that are to be brought there, with the ranks that have sealed them.
            troubles: what is in the way.

        Raises:
            CheckpointError: the cache does not answer.
        """
        order = self._order
        newest = self._newest() if order.number or self._is_new else None
        if newest is not None and newest.step:
            self._saved.append((self._clock(), newest))
        if self._is_new:
            self._is_new = False
            self._write(order)
        if not order.number:
            self._saved.clear()
            return
        told = self._how(order, newest, whole, wished, troubles)
        if told is not None and told != self._told:
            self._told = told
            self._send(told)

    def _newest(self) -> Key | None:
        return max((max(self._states.held(rank), default=Key(0, 0)) for rank in self._ranks), default=None)

    def _write(self, order: Persist) -> None:
        try:
            self._states.board.order(Key.unpack(order.key) if order.number and order.key else None)
        except CheckpointError as error:
            logger.warning("the order to bring a step to storage cannot be given: %s", error)

    def _how(
        self,
        order: Persist,
        newest: Key | None,
        whole: Collection[Key] | None,
        wished: Mapping[Key, set[int]],
        troubles: Sequence[str],
    ) -> Persisting | None:
        def say(state: PersistState, key: Key | None = None, why: str = "") -> Persisting:
            return Persisting(
                order.number,
                self._node_rank,
                state,
                key.pack() if key else 0,
                self._pace(),
                why[:200],
            )

        if not self._has_storage:
            return say("unable", why=_NO_STORAGE)
        if newest is None or not newest.step:
            return say("unable", why=_NO_SAVE)
        first = Key.unpack(order.key)
        if first is None:
            is_measured = self._saved[-1][0] - self._saved[0][0] >= _PACE_S
            return say("ready", newest) if is_measured and self._told is None else None
        if self._on_way is None:
            ready = [key for key, ranks in wished.items() if key >= first and ranks >= self._ranks]
            self._on_way = min(ready, default=None)
        if self._on_way is None:
            return say("waits", first)
        is_there = whole is not None and self._on_way in whole
        return say("there" if is_there else "on the way", self._on_way, troubles[0] if troubles else "")

    def _pace(self) -> float:
        """How many steps a second lie between the saved ones."""
        if len(self._saved) < 2:
            return 0.0
        (begun_s, first), (now_s, last) = self._saved[0], self._saved[-1]
        steps = last.step - first.step if last.incarnation == first.incarnation else 0
        return max(steps, 0) / max(now_s - begun_s, 1e-6)
