"""A rank's snapshots: taken at a step boundary, copied at once or during the next forward and backward.

When copying overlaps with training, the main thread takes references to the tensors and copies at once what no known
optimizer owns (buffers, random states, averages, plain values). Parameters and optimizer states, which only the
optimizer's step changes, are copied by native threads while training goes on; just before an optimizer that owns one of
them steps, the main thread waits for these copies. The native threads seal the slot themselves as soon as the last byte
is there, and from then on other processes may read it.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from keepstep.checkpoint import native
from keepstep.checkpoint.header import StateHeader, encode_header
from keepstep.checkpoint.memory.cache import gib
from keepstep.checkpoint.memory.pages import Trace
from keepstep.checkpoint.memory.rank_slots import RankSlots
from keepstep.checkpoint.memory.slots import Key, Record, newest_common, slot_bytes
from keepstep.checkpoint.optimizers import OptimizerWatch
from keepstep.checkpoint.pace import PATIENCE_S, Pace
from keepstep.checkpoint.restore.restore_service import RestoreClient, restore_address
from keepstep.checkpoint.restore.restoring import Restoring
from keepstep.checkpoint.restore.resume import Agreed, Row, Rows, begin, keys_of, resume, row_of
from keepstep.checkpoint.state import Span, flatten, identity
from keepstep.checkpoint.storage.cadence import Cadence, Storing
from keepstep.core.errors import CheckpointError
from keepstep.core.log_lines import one_line
from keepstep.core.ranges import fold_ranks

Gather = Callable[[Row], Rows]
"""Exchanges rows of equal length: takes this rank's row, returns those of all ranks, by rank."""

_TURNS = 2  # slots that snapshots are taken into by turns
_MOST_THREADS = 4  # threads that copy
_ALONE_S = 120.0  # after which a step that not all ranks have waiting for storage is given up
_MOST_TOLD = 256  # lines that are remembered, so as not to be printed again
_POLL_S = 0.001
_STORED_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Worker:
    """The rank that this process plays, and the job that it belongs to."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    incarnation: int = 0
    layout: str = ""
    elastic: bool = False  # whether the job may go on with more ranks or fewer

    @property
    def one_node(self) -> bool:
        """Whether all ranks of the job run on this node, so that its board shows what each of them holds."""
        return self.world_size == self.local_world_size


@dataclass(slots=True)
class _Flight:
    """A snapshot that is being copied, and the tensors that must not change meanwhile."""

    native: native.Snapshot
    step: int
    index: int  # index of the slot
    spans: list[Span]
    moving: set[int]  # storages that are copied in the background, by identity


class Snapshots:
    """Saves and restores the state of one rank in its node's cache. All methods must be called from one thread."""

    def __init__(
        self,
        address: str,
        worker: Worker,
        gather: Gather,
        *,
        slots: int = 0,
        storing: Storing | None = None,
        elsewhere: bool = False,
        left: list[torch.UntypedStorage] | None = None,
        collectives: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Opens the cache at ``address``; CheckpointError when there is none.

        Args:
            slots: how many slots the rank gets; 0: two that take turns, and with storage one more for a step that is
                on its way there.
            storing: where and how often steps go to storage; None: never.
            elsewhere: whether the node's agent is asked for states that the cache lacks.
            left: memory that nobody uses any more; `load` may put it under what it brings back.
            collectives: how many collectives of all ranks this rank has begun; None where nobody counts them.
        """
        self._worker, self._gather, self._process = worker, gather, os.getpid()
        count = slots or (_TURNS if storing is None else _TURNS + 1)
        self._cache = RankSlots(address, worker.rank, count=count)
        self._threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // worker.local_world_size))
        self._incarnation = worker.incarnation
        self._storing = storing
        self._cadence = Cadence(storing) if storing else None
        self._service = RestoreClient(restore_address(address)) if elsewhere or storing else None
        self._blocked_s = 0.0
        self._unkept: Key | None = None  # the step that was to go to storage but could not be saved here
        self._alone: dict[Key, float] = {}  # since when a step waits for storage here, but not on all ranks
        self._begun = self._saved = False
        self._last: Key | None = None
        self._pace = Pace(collectives)
        self._missed: list[frozenset[Key]] = []  # what the ranks held when a slot was waited for in vain
        self._not_saved = ""  # why the last step was not saved; "": it was
        self._flight: _Flight | None = None
        self._left, self._trace = [] if left is None else left, Trace(())
        self._told: deque[str] = deque(maxlen=_MOST_TOLD)
        self._watch = OptimizerWatch(self._before_step)

    def register(self, state: Any) -> None:
        """As `api.register`; the kernel provides the memory in the background."""
        if not self._cache.slots:
            header, _, text = self._flatten(state, 0)
            self._make_first_room(_slot_bytes(header, text), header.data_bytes)

    def save(self, state: Any, step: int, *, overlap: bool = True, persist: bool | None = None) -> None:
        """Take a snapshot of ``state``, as `api.save` says; CheckpointError also if ``step`` has not grown.

        The first call of an incarnation that has not restored is collective, and so are calls that may bring the step
        to storage. When no slot is free, because other ranks do not save or it is being read, the snapshot is left out
        and a line says so; where all ranks are on one node, up to 30 s are spent waiting for a slot. Ranks that meet in
        collectives between their saves are waited for once for each thing that is missing, and no longer than a step
        where a rank has saved nothing at all.

        While an earlier step is on its way to storage, one that is due is left to a later save; ``persist``
        waits up to 30 s, then leaves the step out and says so.
        """
        if self._process != os.getpid():
            raise CheckpointError("a forked process cannot save: only the one that began to save can")
        self.wait()
        begun_s = time.monotonic()
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        self._pace.note(begun_s)
        if not self._begun:
            self._settle(talk(begin(self._restoring(), self._worker.incarnation), self._gather))
        header, spans, text = self._flatten(state, step)
        key = Key(self._incarnation, step)
        key.pack()
        if self._last is not None and key <= self._last:
            raise CheckpointError(f"step {step} after step {self._last.step}: steps must grow between saves")
        if self._cadence:
            self._cadence.note(step, begun_s, blocked_s, pending=bool(self._cache.wanted()))
        wanted = self._is_wanted(step, persist)
        self._unkept = key if wanted else self._unkept
        nbytes = _slot_bytes(header, text)
        if not self._cache.slots:
            self._make_first_room(nbytes, header.data_bytes)
        index = self._slot()
        if index is None:
            self._say_not_saved(step, time.monotonic() - begun_s)
            return
        if self._cache.slots[index].nbytes < nbytes:
            try:
                self._cache.make_room(nbytes, index)
            except CheckpointError:
                self._cache.slots[index].unlock()
                raise
        self._cache.slots[index].want(key if wanted else None)
        self._start(header, spans, text, index, key, overlap)
        self._unkept = None if wanted else self._unkept
        self._last, self._not_saved = key, ""
        self._blocked_s += time.monotonic() - begun_s

    def wait(self) -> None:
        """Return when the last snapshot is sealed. Call it before changing saved tensors other than by an optimizer."""
        flight = self._flight
        # A forked child has none of the copying threads.
        if flight is not None and self._process == os.getpid():
            begun_s = time.monotonic()
            self._await(flight)
            self._flight = None
            self._blocked_s += time.monotonic() - begun_s

    def load(self, state: Any) -> int | None:
        """Bring the newest snapshot that every rank can have into ``state``; its step, or None when no rank has any.

        Collective. `Filling` describes what becomes of the values in ``state``.

        Raises:
            CheckpointError: there are snapshots, but none that all ranks have whole; or the snapshot does not fit
                ``state``, which may be half restored then.
        """
        self.wait()
        rank = self._restoring(state)
        try:
            agreed = talk(resume(rank, self._worker.incarnation), self._gather)
        except CheckpointError as error:
            raise rank.error or error from None
        if agreed.key is not None:
            rank.finish()
        self._settle(agreed)
        if agreed.key is None:
            return None
        own, moved = self._worker.rank, agreed.moved
        if own == 0 or (own in moved and len(moved) < self._worker.world_size):
            others = [other for other in moved if other != own]
            besides = f"; ranks {fold_ranks(others)} from elsewhere" if others and own not in moved else ""
            who = f"rank {own} " if own else ""
            self._say(f"{who}resumed after step {agreed.key.step} from {rank.source(agreed.key)}{besides}")
        return agreed.key.step

    def memory(self) -> list[torch.UntypedStorage]:
        """The large storages of the last saved state that still exist. They must not change before `wait`."""
        return self._trace.take()

    def end(self) -> None:
        """Wait, and stop all threads: a thread in native code while the interpreter ends would crash the process."""
        self.wait()
        if self._process == os.getpid():
            self._cache.stop_populating()

    def close(self) -> None:
        """Wait, and unmap the cache, which keeps its snapshots."""
        self.wait()
        self._watch.close()
        self._cache.close()

    def _restoring(self, state: Any = None) -> Restoring:
        return Restoring(
            self._cache,
            self._worker.world_size,
            state,
            service=self._service,
            required=self._storing is not None,
            elastic=self._worker.elastic,
            # All cores, because no rank trains during a restore.
            threads=max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)))),
            left=self._left,
            say=self._say,
        )

    def _make_first_room(self, nbytes: int, data_bytes: int) -> None:
        self._cache.make_room(nbytes)
        total = sum(slot.nbytes for slot in self._cache.slots)
        self._say(
            f"{len(self._cache.slots)} snapshots of rank {self._worker.rank} take {gib(total)} "
            f"({total / max(1, data_bytes):.1f} × its state) of the {gib(self._cache.limit_bytes)} that the node gives",
            every_rank=False,
        )

    def _settle(self, agreed: Agreed) -> None:
        """Go on from what all ranks have agreed on."""
        if agreed.given_up:
            self._say(agreed.given_up, every_rank=False)
        self._cache.settle(agreed.key, agreed.pending, wanted=agreed.wanted)
        if agreed.key and agreed.alike:
            self._cache.say_alike(agreed.key)
        self._incarnation, self._last, self._begun = agreed.incarnation, agreed.key, True
        if self._cadence:
            self._cadence.begin(agreed.key.step if agreed.key else 0)

    def _is_wanted(self, step: int, persist: bool | None) -> bool:
        """Whether all ranks bring the step to storage: it is due or asked for, and each rank has a slot to spare."""
        if self._cadence is None:
            if persist:
                raise CheckpointError(
                    f"step {step} is to be brought to storage, and there is none: `keepstep run --checkpoint-dir`"
                )
            return False
        if not (self._cadence.due(step) if persist is None else persist):
            return False
        deadline_s = time.monotonic() + (PATIENCE_S if persist else 0.0)
        while True:
            pending = self._cache.wanted()
            full, late = len(pending) >= self._cache.count - _TURNS, time.monotonic() >= deadline_s
            unkept = self._unkept.pack() if self._unkept else 0
            rows = self._gather(row_of(pending, full, late, self._cadence.proposal(), unkept))
            self._cadence.agree(row[2] for row in rows)
            self._let_go(rows)
            if not any(row[0] for row in rows):
                self._cadence.accepted(step, time.monotonic())
                return True
            if any(row[1] for row in rows):
                if persist:
                    self._say_left_out(step, "the one before is not there yet")
                return False
            time.sleep(_STORED_POLL_S)

    def _let_go(self, rows: Rows) -> None:
        """Give up steps on their way to storage that cannot become whole there, because a rank lacks its part."""
        for number, row in enumerate(rows):
            key = Key.unpack(row[3])
            if key is not None:
                self._cache.let_go(key)
                self._say_left_out(key.step, f"rank {number} did not keep it")
        self._unkept = None
        pending = self._cache.wanted()
        alone = {key for key in pending if not all(key in keys_of(row) for row in rows)}
        now_s = time.monotonic()
        self._alone = {key: self._alone.get(key, now_s) for key in alone}
        for key, since_s in self._alone.items():
            # Ranks learn within seconds of each other that a step is on storage.
            if now_s - since_s > _ALONE_S:
                self._cache.let_go(key)
                self._say_left_out(key.step, "not all ranks have it any more", every_rank=True)

    def _say_left_out(self, step: int, why: str, *, every_rank: bool = False) -> None:
        assert self._storing
        self._say(
            f"step {step} is not brought to storage {self._storing.where}: {why}", every_rank=every_rank
        )

    def _slot(self) -> int | None:
        if not self._worker.one_node or self._worker.elastic:
            digest = self._cache.digest(self._last) if self._worker.elastic and self._last else 0
            rows = self._gather(row_of((key for key in self._cache.held() if key), digest))
            if digest and self._last and all(row[0] == digest for row in rows):
                self._cache.say_alike(self._last)
            return self._cache.take(lambda: newest_common(map(keys_of, rows)))
        board, begun_s = self._cache.board, time.monotonic()
        while True:
            held = [frozenset(board.held(rank)) for rank in range(self._worker.world_size)]
            index = self._cache.take(functools.partial(newest_common, held))
            if index is not None:
                return index
            if time.monotonic() - begun_s >= self._pace.patience_s(held, self._missed):
                self._missed = held
                return None
            time.sleep(_POLL_S)

    def _say_not_saved(self, step: int, waited_s: float) -> None:
        """Say why there was no slot, once until there is one again or the reason is another."""
        never = [rank for rank, keys in enumerate(self._missed) if not keys]
        if never and self._pace.in_step:
            who = f"{'rank' if len(never) == 1 else 'ranks'} {fold_ranks(never)}"
            why = (
                f"{who} never saved. A step counts once every rank has saved it: call save on all ranks, "
                "not only on rank 0"
            )
        else:
            after = f" after {PATIENCE_S:g} s" if waited_s >= PATIENCE_S else ""
            why = (
                f"no free slot{after}. Another rank is behind, or the slot is being read. "
                "Do all ranks save the same steps?"
            )
        if why != self._not_saved:
            self._say(f"step {step} was not saved: {why}")
        self._not_saved = why

    def _flatten(self, state: Any, step: int) -> tuple[StateHeader, list[Span], bytes]:
        worker = self._worker
        header, spans = flatten(
            with_state_dicts(state),
            step=step,
            incarnation=self._incarnation,
            rank=worker.rank,
            world_size=worker.world_size,
            layout=worker.layout,
            first=self._last is None,
        )
        return header, spans, encode_header(header)

    def _start(
        self, header: StateHeader, spans: list[Span], text: bytes, index: int, key: Key, overlap: bool
    ) -> None:
        owned = self._watch.owned() if overlap else set[int]()
        if overlap and not owned and self._saved:
            why = (
                "an optimizer steps inside backward"
                if self._watch.in_backward
                else "no torch optimizer stepped"
            )
            self._say(f"{why}: snapshots are copied at the step boundary, not during the next step")
        self._saved = True
        plan, copies, moving = array("Q"), list[torch.Tensor](), set[int]()
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() and native.has_cuda() else -1
        for entry, span in zip(header.storages, spans, strict=True):
            address, bits, device = span.pointer, native.URGENT, span.storage.device
            there = device.type == "cuda" and device.index == gpu
            if device.type != "cpu" and not there:
                copies.append(span.view().cpu())
                address = copies[-1].data_ptr()
            elif identity(span.storage) in owned:
                moving.add(identity(span.storage))
                bits = 0
            plan.extend((address, entry.offset, entry.nbytes, bits | (native.ON_DEVICE if there else 0)))
        started = native.Snapshot(
            self._cache.slots[index].memory,
            plan,
            header=text,
            data_bytes=header.data_bytes,
            step=key.step,
            incarnation=key.incarnation,
            lock=self._cache.slots[index].fileno(),
            board=self._cache.board.memory,
            board_index=self._cache.board.index(self._worker.rank, index),
            board_value=key.pack(),
            threads=self._threads,
            stream=torch.cuda.current_stream().cuda_stream if gpu >= 0 else 0,
        )
        self._flight = _Flight(started, key.step, index, spans, moving)
        self._trace = Trace(spans)
        self._await(self._flight, urgent=True)
        if not moving:
            self.wait()

    def _await(self, flight: _Flight, *, urgent: bool = False) -> None:
        try:
            flight.native.wait(urgent)
        except RuntimeError as error:
            self._cache.slots[flight.index].unlock()
            self._say(f"step {flight.step} was not saved: the device did not give its bytes: {error}")

    def _before_step(self, parameters: Iterator[int]) -> None:
        flight = self._flight
        if flight is not None and any(found in flight.moving for found in parameters):
            self.wait()

    def _say(self, text: str, *, every_rank: bool = True) -> None:
        if text not in self._told and (every_rank or self._worker.rank == 0):
            self._told.append(text)
            print(f"keepstep: {one_line(text)}", file=sys.stderr, flush=True)


def talk(steps: Generator[Row, Rows, Agreed], gather: Gather) -> Agreed:
    """Run a generator of `resume`: gather each row that it yields over all ranks, and send it the rows of all."""
    row = next(steps)
    while True:
        try:
            row = steps.send(gather(row))
        except StopIteration as end:  # noqa: PERF203
            return cast("Agreed", end.value)


def with_state_dicts(state: Any) -> Any:
    """``state`` with every object in its dicts, lists and tuples that has a ``state_dict()`` replaced by it."""
    if hasattr(state, "state_dict") and hasattr(state, "load_state_dict"):
        return state.state_dict()
    if type(state) is dict:
        return {key: with_state_dicts(value) for key, value in cast("dict[Any, Any]", state).items()}
    if type(state) in (list, tuple):
        return type(state)(with_state_dicts(value) for value in state)
    return state


def _slot_bytes(header: StateHeader, text: bytes) -> int:
    """Size of a slot for this state, with some spare for later ones."""
    record = Record(header.step, header.incarnation, header.data_bytes, len(text), len(header.storages), 0)
    return slot_bytes(record, spare=True)
