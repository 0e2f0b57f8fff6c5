"""The agent's part in backups: it reports what the node's cache holds, and brings the backups the controller orders.

It also gives snapshots to other nodes. All this runs in threads beside the agent's loop, which only passes messages on.
Everything that must outlive the agent is in the cache: snapshots, backups, and which snapshot workers keep
(`Board.keep`).
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec

from keepstep.checkpoint.memory.cache_server import Open, ask
from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.memory.incoming import Incoming, Room
from keepstep.checkpoint.memory.slot import SLOTS_PER_BACKUP, Slot, backup_of, backups_on
from keepstep.checkpoint.memory.slots import Key, Record
from keepstep.checkpoint.peers.fetch import Cancelled, Fetch
from keepstep.checkpoint.peers.state_server import Rate, state_server
from keepstep.checkpoint.storage.manifest import key_text
from keepstep.core.errors import CheckpointError, KeepstepError
from keepstep.core.summary import Endpoint
from keepstep.wire.messages import (
    MOST_HELD_KEYS,
    BackUp,
    Holder,
    Inventory,
    Locate,
    Located,
    Message,
    RankKeys,
)
from keepstep.wire.secret import RunKey

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_TELL_S = 2.0  # least time between two inventories that differ in nothing that the controller waits for
_AT_ONCE = 2  # most transfers at a time
_AGAIN_S = (0.5, 30.0)  # first and longest wait after a failed transfer; it doubles each time
_LOCATE_S = 10.0  # how long the controller may be silent after a question; starting a new one takes less
_LONGEST_LOCATE_S = 120.0  # how long the controller may answer that it waits for other nodes
_ASK_AGAIN_S = 1.0
_MOST_WAITING = 64
_MOST_TROUBLE = 400


@dataclass(slots=True)
class _Transfer:
    """The transfer of a backup to this node."""

    key: Key
    fetch: Fetch | None = None
    stopped: bool = False


class NodeBackups:
    """Backups of one node. ``send`` is called from threads and must pass messages to the agent's loop."""

    def __init__(
        self,
        address: str,
        ranks: Collection[int],
        node: str,
        node_rank: int,
        run: RunKey,
        send: Callable[[Message], None],
        *,
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,
        bytes_per_s: float = 0.0,
    ) -> None:
        """``address``: address of the cache. ``tls``: contexts for the server and for clients.

        ``bytes_per_s``: most bytes a second that are sent to other nodes; 0: no limit.
        """
        self._address, self._ranks = address, tuple(sorted(ranks))
        self._node, self._node_rank, self._run_key, self._send = node, node_rank, run, send
        self._fetch_tls = tls[1] if tls else None
        self.states = CachedStates(address, self._ranks)
        self._server = state_server(run, self._reading, tls=tls[0] if tls else None, rate=Rate(bytes_per_s))
        self._guard = threading.Lock()
        self._wake = threading.Event()
        self._stopped = False
        self._order: BackUp | None = None
        self._told: Inventory | None = None
        self._told_s = 0.0
        # Other nodes' ranks with backups here; None: not read from the cache yet.
        self._backed: set[int] | None = None
        self._failure = ""  # why the cache cannot be read
        self._able: dict[int, bool] = {}  # whether a rank has enough slots to be backed up, once known
        self._transfers: dict[int, _Transfer] = {}
        # After failed transfers, by rank: when to try again, how long the last wait was, and the error.
        self._waits: dict[int, tuple[float, float, str]] = {}
        self._questions: dict[int, SimpleQueue[Located]] = {}  # answers to questions, by request number
        self._requests = 0
        self._thread = threading.Thread(target=self._run, name="keepstep-backups", daemon=True)

    # These methods are called from the agent's loop, and never wait.

    def start(self) -> None:
        """Begin to watch the cache and to give its snapshots."""
        self._thread.start()

    def stop(self) -> None:
        """End all transfers. The cache keeps the snapshots that are complete."""
        self._stopped = True
        self._wake.set()
        self._server.close()
        with self._guard:
            for transfer in self._transfers.values():
                _stop(transfer)

    def again(self) -> list[Message]:
        """The messages that a new controller must hear."""
        return [self._told] if self._told else []

    def received(self, message: BackUp | Located) -> None:
        """Take an order or an answer of the controller."""
        with self._guard:
            if isinstance(message, BackUp):
                self._order = message
            elif message.request in self._questions:
                self._questions[message.request].put(message)
        self._wake.set()

    def use_addresses(self, addresses: Iterable[str]) -> None:
        """Give states on these addresses of this node, too."""
        self._server.listen(addresses)

    # These methods are called from any other thread, and may wait.

    def locate(self, rank: int) -> list[Holder]:
        """Which other nodes hold snapshots of a rank, or snapshots of another rank that are the same on all ranks.

        Raises:
            CheckpointError: the controller does not answer.
        """
        with self._guard:
            if len(self._questions) >= _MOST_WAITING:
                raise CheckpointError(
                    f"{_MOST_WAITING} questions to the controller wait for an answer already"
                )
            self._requests += 1
            request, answers = self._requests, SimpleQueue[Located]()
            self._questions[request] = answers
        try:
            holders = self._ask(Locate(request, (rank,)), answers)
        finally:
            with self._guard:
                del self._questions[request]
        # A backup on this node itself counts: a rank may come back to the node on which it left its snapshot.
        return [one for one in holders if one.node_rank != self._node_rank or not one.own]

    def _ask(self, question: Locate, answers: SimpleQueue[Located]) -> tuple[Holder, ...]:
        """Repeat the question until it is answered: a controller that has just started may know nothing yet."""
        began_s = heard_s = time.monotonic()
        waits = ""
        while True:
            self._send(question)
            answer: Located | None = None
            with suppress(Empty):
                answer = answers.get(timeout=_ASK_AGAIN_S)
            now_s = time.monotonic()
            if answer and not answer.waits:
                return answer.holders
            if answer:
                heard_s = now_s
                if answer.waits != waits:
                    waits = answer.waits
                    log.info("rank %d: its state is looked for: %s", question.ranks[0], waits)
            if now_s > heard_s + _LOCATE_S or now_s > began_s + _LONGEST_LOCATE_S:
                why = f": {waits}" if waits else ""
                raise CheckpointError(
                    f"the controller did not say within {now_s - began_s:.0f} s which nodes have what{why}"
                )
            if answer:
                time.sleep(_ASK_AGAIN_S / 10)

    def fetch(self, key: Key, rank: int, where: Callable[[], Sequence[Endpoint]]) -> Fetch:
        """A transfer from another node, which the caller must run."""
        return Fetch(key, rank, where, self._run_key, tls=self._fetch_tls)

    def trouble(self) -> str:
        """Why the cache cannot be read, or why an ordered backup is missing; "": nothing is wrong."""
        with self._guard:
            waits = (f"rank {rank}: {why}" for rank, (_, _, why) in sorted(self._waits.items()))
            return (self._failure or next(waits, ""))[:_MOST_TROUBLE]

    # These methods run in threads of this object.

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._look()
                self._failure = ""
            # The cache fails when its launcher ends, or runs out of memory or descriptors.
            except Exception as error:
                if str(error) != self._failure:
                    self._failure = str(error)
                    log.warning("backups: %s", error, exc_info=unexpected(error))
                if self._told:  # as far as is known, only the trouble has changed since the last inventory
                    self._tell(msgspec.structs.replace(self._told, trouble=self.trouble()), time.monotonic())
            self._wake.wait(_LOOK_S)
            self._wake.clear()
        self.states.close()

    def _look(self) -> None:
        if self._backed is None:
            self._backed = self._find_backups()
        with self._guard:
            order = self._order
        if order is not None:
            self._carry_out(order, self._backed)
        self._tell(self._inventory(self._backed), time.monotonic())

    def _find_backups(self) -> set[int]:
        answer = ask(self._address, Open(self._ranks[0]))
        try:
            return set(backups_on(answer.board))
        finally:
            answer.close()

    def _inventory(self, backed: set[int]) -> Inventory:
        keep, first = self.states.board.kept()
        own = _rows((rank, self.states.held(rank)) for rank in self._ranks)
        backups = _rows((rank, self.states.held(backup_of(rank))) for rank in sorted(backed))
        return Inventory(
            self._node_rank,
            own,
            backups,
            keep.pack() if keep else 0,
            first.pack() if first else 0,
            all(self._is_able(row.rank) for row in own),
            self._server.endpoints,
            self.trouble(),
            next(iter(_rows([alike] if (alike := self.states.alike()) else [])), None),
        )

    def _is_able(self, rank: int) -> bool:
        if rank not in self._able:
            answer = ask(self._address, Open(rank))
            answer.close()
            self._able[rank] = answer.backed
        return self._able[rank]

    def _tell(self, now: Inventory, now_s: float) -> None:
        told = self._told
        if now == told:
            return
        if told and now_s - self._told_s < _TELL_S and _decisive(now) == _decisive(told):
            return
        self._told, self._told_s = now, now_s
        self._send(now)

    def _carry_out(self, order: BackUp, backed: set[int]) -> None:
        board = self.states.board
        keep, first = Key.unpack(order.keep), Key.unpack(order.first)
        if board.kept() != (keep, first):
            board.keep(keep, first)
        target = Key.unpack(order.target)
        wanted = {rank: pull for pull in order.pulls for rank in pull.ranks} if target else {}
        now_s = time.monotonic()
        with self._guard:
            for rank, transfer in self._transfers.items():
                if rank not in wanted or transfer.key != target:
                    _stop(transfer)
            for rank in wanted:
                if self._stopped or len(self._transfers) >= _AT_ONCE:
                    break
                if rank in self._transfers or self._waits.get(rank, (0.0,))[0] > now_s:
                    continue
                if target and target not in board.held(backup_of(rank)):
                    thread = threading.Thread(
                        target=self._bring, args=(rank, target), name="keepstep-backup", daemon=True
                    )
                    self._transfers[rank] = _Transfer(target)
                    try:
                        thread.start()
                    except RuntimeError:  # the process can start no more threads
                        del self._transfers[rank]
                        raise
        if order.settled and not self._transfers:
            for rank in backed - set(order.ranks):
                if rank in self._ranks and keep not in board.held(rank):
                    continue  # this node now runs the rank, and the old backup counts until there is a newer snapshot
                self.states.give_up(backup_of(rank))
                backed.discard(rank)

    def _bring(self, rank: int, key: Key) -> None:
        """Bring one backup here, in a thread of its own."""
        transfer = self._transfers[rank]
        failure = "no node that has it gives states on an address that others reach"
        done, name = False, key_text(key)
        for source in range(self._sources(rank)):
            fetch = self.fetch(key, rank, lambda source=source: self._where(rank, source))
            with self._guard:
                if transfer.stopped:
                    break
                transfer.fetch = fetch
            try:
                began_s = time.monotonic()
                fetch.run(
                    lambda record: self.states.filling(
                        backup_of(rank), SLOTS_PER_BACKUP, record, self._needed(key)
                    )
                )
                took_s = time.monotonic() - began_s
                log.info("%s of rank %d is backed up here after %.2f s", name, rank, took_s)
                failure, done = "", True
                break
            except Cancelled:
                failure = ""
                break
            except Exception as error:  # another node or the cache failed; it is tried again
                failure, why = f"{error}"[:400], unexpected(error)
                log.warning("%s of rank %d is not backed up here: %s", name, rank, error, exc_info=why)
        with self._guard:
            del self._transfers[rank]
            wait_s = min(2 * self._waits.get(rank, (0.0, _AGAIN_S[0] / 2, ""))[1], _AGAIN_S[1])
            if failure:
                self._waits[rank] = (time.monotonic() + wait_s, wait_s, failure)
            else:
                self._waits.pop(rank, None)
            if done and self._backed is not None:
                self._backed.add(rank)
        self._wake.set()

    def _sources(self, rank: int) -> int:
        with self._guard:
            order = self._order
        pulls = order.pulls if order else ()
        return max((len(pull.endpoints) for pull in pulls if rank in pull.ranks), default=0)

    def _where(self, rank: int, source: int) -> Sequence[Endpoint]:
        """Endpoints of the source in the newest order, because a restarted agent listens on other ports."""
        with self._guard:
            order = self._order
        for pull in order.pulls if order else ():
            if rank in pull.ranks and source < len(pull.endpoints):
                return pull.endpoints[source]
        return ()

    def _needed(self, target: Key) -> tuple[Key | None, Key]:
        """The snapshots that must not be dropped to make room for a backup."""
        with self._guard:
            order = self._order
        return Key.unpack(order.keep) if order else None, target

    @contextmanager
    def _reading(self, key: Key, rank: int) -> Generator[tuple[Slot, Record]]:
        """Read a state of this node's cache, a rank's own or a backup."""
        with ExitStack() as stack:
            try:
                if rank not in self._ranks:
                    raise CheckpointError(f"rank {rank} is of another node")
                found = stack.enter_context(self.states.reading(key, rank))
            except CheckpointError:
                if rank not in (self._backed or ()):
                    raise CheckpointError(f"{key_text(key)} of rank {rank} is not on {self._node}") from None
                found = stack.enter_context(self.states.reading(key, backup_of(rank)))
            yield found


class NeighbourSource:
    """The `StateSource` of states that other nodes hold, as backups or as their own."""

    def __init__(self, backups: NodeBackups) -> None:
        self._backups = backups

    where = "the other nodes"

    def keys(self, rank: int) -> frozenset[Key]:
        """The snapshots that other nodes hold for a rank. Raises CheckpointError if the controller does not say."""
        words = {word for one in self._backups.locate(rank) for word in one.keys}
        return frozenset(key for key in map(Key.unpack, words) if key is not None)

    def bring(self, key: Key, rank: int, room: Room) -> str:
        """Bring a rank's snapshot into the slot that ``room`` gives; return which node it came from.

        Raises:
            CheckpointError: no node gives it. The message names the node asked last, and why it failed.
        """
        failure = CheckpointError(f"no other node holds {key_text(key)} of rank {rank}")
        holders = [one for one in self._backups.locate(rank) if key.pack() in one.keys]
        alike = any(holder.rank != rank for holder in holders)

        @contextmanager
        def marked(record: Record) -> Generator[Incoming]:
            with room(record) as incoming:
                incoming.alike = alike
                yield incoming

        for holder in holders:
            try:
                fetch = self._backups.fetch(key, holder.rank, lambda holder=holder: holder.endpoints)
                fetch.run(marked)
                return f"{'the cache of' if holder.own else 'the backup on'} {holder.node}"
            except CheckpointError as error:  # noqa: PERF203
                failure = CheckpointError(f"{holder.node}: {error}")
                log.warning("%s of rank %d: %s", key_text(key), rank, failure)
        raise failure


def _rows(held: Iterable[tuple[int, frozenset[Key]]]) -> tuple[RankKeys, ...]:
    return tuple(
        RankKeys(rank, tuple(sorted(key.pack() for key in keys))[-MOST_HELD_KEYS:])
        for rank, keys in held
        if keys
    )


def _decisive(inventory: Inventory) -> tuple[Inventory, list[tuple[int, bool, int]]]:
    """The part of an inventory on which the controller's decisions depend, without each new snapshot of workers."""
    kept: list[tuple[int, bool, int]] = []
    for row in inventory.own:
        oldest = min((word for word in row.keys if word >= inventory.first), default=0)
        kept.append((row.rank, inventory.keep in row.keys, oldest))
    return msgspec.structs.replace(inventory, own=(), alike=None), kept if inventory.first else []


def unexpected(error: Exception) -> Exception | None:
    """The error, if its traceback should be logged: it is neither ours nor the system's."""
    return None if isinstance(error, KeepstepError | OSError) else error


def _stop(transfer: _Transfer) -> None:
    transfer.stopped = True
    if transfer.fetch is not None:
        transfer.fetch.stop()
