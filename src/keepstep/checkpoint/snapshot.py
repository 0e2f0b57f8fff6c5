"""A rank's snapshots: taken at a step boundary, copied at once or during the next forward and backward.

When copying overlaps with training, the main thread takes references to the tensors and copies at once what no known
optimizer owns (buffers, random states, averages, plain values). Parameters and optimizer states, which only the
optimizer's step changes, are copied by native threads while training goes on; just before an optimizer that owns one of
them steps, the main thread waits for these copies. The native threads seal the slot themselves as soon as the last byte
is there, and from then on other processes may read it.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import torch

from keepstep.checkpoint import native
from keepstep.checkpoint.header import StateHeader, encode_header
from keepstep.checkpoint.matching import Matches, Moment, Store, newest_whole
from keepstep.checkpoint.memory.cache import gib
from keepstep.checkpoint.memory.pages import Trace
from keepstep.checkpoint.memory.rank_slots import RankSlots
from keepstep.checkpoint.memory.slots import Key, Record, slot_bytes
from keepstep.checkpoint.optimizers import Family, OptimizerWatch
from keepstep.checkpoint.pace import Pace
from keepstep.checkpoint.restore.restore_service import RestoreClient, restore_address
from keepstep.checkpoint.restore.restoring import Restoring
from keepstep.checkpoint.restore.resume import Agreed, Row, Rows, SaidByAnother, begin, resume
from keepstep.checkpoint.state import Span, flatten, identity, with_families, with_state_dicts
from keepstep.checkpoint.storage.cadence import Storing
from keepstep.checkpoint.storage.wishes import Wishes
from keepstep.checkpoint.unseen_aborts import why_unseen
from keepstep.core.errors import CheckpointError
from keepstep.core.log_lines import one_line
from keepstep.core.ranges import fold_ranks

Gather = Callable[[Row], Rows]
"""Exchanges rows of equal length: takes this rank's row, returns those of all ranks, by rank."""

_TURNS = 2  # slots that snapshots are taken into by turns
_MOST_THREADS = 4  # threads that copy
_MOST_TOLD = 256  # lines that are remembered, so as not to be printed again
_LONGEST_TOPIC = 100
_POLL_S = 0.002


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
    index: int  # index of the slot
    spans: list[Span]
    moving: set[int]  # storages that are copied in the background, by identity
    key: Key
    moment: Moment


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
        store: Callable[[], Store | None] = lambda: None,
    ) -> None:
        """Opens the cache at ``address``; CheckpointError when there is none.

        Args:
            slots: how many slots the rank gets; 0: two that take turns, and with storage one more for a step that is
                on its way there.
            storing: where and how often steps go to storage; None: never.
            elsewhere: whether the node's agent is asked for states that the cache lacks.
            left: memory that nobody uses any more; `load` may put it under what it brings back.
            collectives: how many collectives of all ranks this rank has begun; None where nobody counts them.
            store: the store that all ranks share; None where there is none.
        """
        self._worker, self._gather, self._process = worker, gather, os.getpid()
        count = slots or (_TURNS if storing is None else _TURNS + 1)
        self._cache = RankSlots(address, worker.rank, count=count)
        self._threads = max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // worker.local_world_size))
        self._incarnation = worker.incarnation
        self._storing = storing
        self._service = RestoreClient(restore_address(address)) if elsewhere or storing else None
        self._blocked_s = 0.0
        self._begun = self._saved = False
        self._whole = False  # whether some snapshot of this training is known to be whole on all ranks
        self._last: Key | None = None
        self._number = 0  # number of the last save in this incarnation
        self._pace = Pace(collectives)
        self._matches = Matches(store, worker.rank, worker.world_size, worker.incarnation)
        self._in_vain = False  # whether the last wait for a slot, if there was one, was in vain
        self._wishes = (
            Wishes(storing, self._cache, self._matches, self._pace, gather, self._say, _TURNS)
            if storing
            else None
        )
        self._flight: _Flight | None = None
        self._left, self._trace = [] if left is None else left, Trace(())
        self._told: deque[str] = deque(maxlen=_MOST_TOLD)
        self._watch, self._families = OptimizerWatch(self._before_step), list[Family]()

    def register(self, state: Any) -> None:
        """As `api.register`; the kernel provides the memory in the background."""
        if not self._cache.slots:
            header, _, text = self._flatten(state, 0)
            try:
                self._make_first_room(_slot_bytes(header, text), header.data_bytes)
            except CheckpointError as error:
                self._once(
                    "memory", f"no checkpoint is kept in memory, and training goes on without: {error}"
                )

    def save(self, state: Any, step: int, *, overlap: bool = True, persist: bool | None = None) -> None:
        """Take a snapshot of ``state``, as `api.save` says; CheckpointError also if ``step`` has not grown.

        A step that cannot be saved is left out, and that is said once for each reason: the ranks do not save the same
        steps, the node's memory does not hold it, or no slot is free. Other ranks are waited for no longer than a step
        of the job takes, and not again before they come. Ranks exchange something only where all of them are here:
        in the first call of an incarnation that has not restored, and where the step may go to storage.

        While an earlier step is on its way to storage, one that is due is left to a later save, and so is one with
        ``persist`` once it has waited for a step's time.
        """
        if self._process != os.getpid():
            raise CheckpointError("a forked process cannot save: only the one that began to save can")
        self.wait()
        begun_s = time.monotonic()
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        self._pace.note(begun_s)
        self._number += 1
        self._matches.begins(step, self._number)
        if not self._begun and not self._begin(step):
            return
        key = Key(self._incarnation, step)
        key.pack()
        if self._last is not None and key <= self._last:
            raise CheckpointError(f"step {step} after step {self._last.step}: steps must grow between saves")
        self._compare()
        self._families = self._watch.families()
        header, spans, text = self._flatten(state, step)
        if self._wishes:
            self._wishes.note(step, begun_s, blocked_s)
        wanted = self._is_wanted(key, persist)
        if unseen := why_unseen():
            self._matches.left_out(key)
            self._once("aborts", f"no step is kept, and training goes on without: {unseen}")
            return
        try:
            index = self._slot(key, _slot_bytes(header, text), header.data_bytes)
        except CheckpointError as error:
            self._matches.left_out(key)
            self._once("memory", f"step {step} is not kept in memory, and training goes on without: {error}")
            return
        if index is None:
            return
        if header.first and self._whole:  # the others were waited for
            header = msgspec.structs.replace(header, first=False)
            text = encode_header(header)
        self._cache.slots[index].want(key if wanted else None)
        self._start(header, spans, text, index, key, overlap)
        if self._wishes and wanted:
            self._wishes.kept()
        self._last = key
        self._blocked_s += time.monotonic() - begun_s

    def wait(self) -> None:
        """Return when the last snapshot is sealed. Call it before changing saved tensors other than by an optimizer."""
        flight = self._flight
        # A forked child has none of the copying threads.
        if flight is not None and self._process == os.getpid():
            begun_s = time.monotonic()
            self._flight = None
            if self._await(flight):
                digest = self._cache.digest(flight.key) if self._worker.elastic else 0
                self._matches.sealed(flight.key, flight.moment, digest)
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
            why = rank.error or error
            if not isinstance(why, SaidByAnother):
                self._once("refused", f"nothing is restored: {why}")
            raise why from None
        self._say_refused(rank)
        if agreed.key is not None:
            rank.finish()
        self._number = 0
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
        try:
            self._cache.make_room(nbytes)
        except CheckpointError:
            if self._cache.count <= _TURNS:
                raise
            self._cache.count = (
                _TURNS  # steps go to storage from the slots that take turns, and hold up others
            )
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
            self._once("unmatched", agreed.given_up)
        if agreed.warning:
            self._say(agreed.warning, every_rank=False)
        self._cache.settle(agreed.key, agreed.pending, wanted=agreed.wanted)
        if agreed.key and agreed.alike:
            self._cache.say_alike(agreed.key)
        self._incarnation, self._last, self._begun = agreed.incarnation, agreed.key, True
        self._whole = agreed.key is not None
        self._matches.agreed(agreed.key)
        if self._wishes:
            self._wishes.begin(agreed.key.step if agreed.key else 0)

    def _is_wanted(self, key: Key, persist: bool | None) -> bool:
        """Whether all ranks bring the step to storage."""
        if self._wishes is not None:
            return self._wishes.takes_on(key, persist, lambda: self._compare(missed=self._pace.in_step))
        if persist:
            raise CheckpointError(
                f"step {key.step} is to be brought to storage, and there is none: `keepstep run --checkpoint-dir`"
            )
        return False

    def _begin(self, step: int) -> bool:
        """Agree with all ranks on what to keep, as nothing was restored. False: they are not all here."""
        if not self._matches.possible:
            self._once(
                "group", "the ranks cannot agree on a checkpoint: call init_process_group() before save()"
            )
            return False
        if not self._worker.incarnation and self._storing is None and not any(self._cache.held()):
            self._settle(Agreed(None, 0))  # no rank has anything yet
        elif self._matches.meet(f"begin/{step}", self._pace.patience_s):
            rank = self._restoring()
            self._settle(talk(begin(rank, self._worker.incarnation), self._gather))
            self._say_refused(rank)
        else:
            self._compare(missed=self._pace.in_step)
        return self._begun

    def _compare(self, *, missed: bool | None = None) -> bool:
        """Say, once, where other ranks save otherwise than this one. Returns whether that is known."""
        if missed is None:  # at the first saves, it is looked at if the last one is not whole by now
            if self._whole or not 2 <= self._number <= 3 or self._newest_whole():
                return False
            missed = self._number == 3 and self._pace.in_step
        why = self._matches.objection(missed)
        if why:
            self._in_vain = True
            kept = f"a restart goes on from {'what all have' if self._whole else 'the beginning'}"
            self._once("unmatched", f"no checkpoint is kept: {why}; until then {kept}")
        return bool(why)

    def _slot(self, key: Key, nbytes: int, data_bytes: int) -> int | None:
        """The index of a locked slot of ``nbytes`` for ``key``; None: there is none, which was said.

        Raises CheckpointError when there is no memory for it.
        """
        if not self._cache.slots:
            self._make_first_room(nbytes, data_bytes)
        until_s = time.monotonic() + (0.0 if self._in_vain else self._pace.patience_s())
        if self._worker.elastic and self._last:
            while not self._matches.is_whole(self._last) and time.monotonic() < until_s:
                time.sleep(_POLL_S)
            for held in filter(self._matches.is_alike, filter(None, self._cache.held())):
                self._cache.say_alike(held)
        while True:
            index = self._cache.take(self._newest_whole, self._matches.is_dead)
            if index is not None:
                break
            if time.monotonic() >= until_s:
                self._leave_out(key)
                return None
            time.sleep(_POLL_S)
        self._in_vain = False
        if self._cache.slots[index].nbytes < nbytes:
            self._cache.make_room(nbytes, index)
        return index

    def _newest_whole(self) -> Key | None:
        found = newest_whole(self._cache.held(), self._matches)
        self._whole = self._whole or found is not None
        return found

    def _leave_out(self, key: Key) -> None:
        """No slot is free: tell others that they need not keep this step, and say why, once it is so again."""
        again, self._in_vain = self._in_vain, True
        self._matches.left_out(key)
        missed = self._pace.in_step if self._pace.collectives else again
        if self._compare(missed=missed) or not again:
            return
        if self._last and self._matches.is_whole(self._last):
            why = "its slots are being read, or wait for storage"
        else:
            why = "other ranks are behind. Do all ranks save the same steps?"
        self._once("left-out", f"step {key.step} of rank {self._worker.rank} was not saved: {why}")

    def _flatten(self, state: Any, step: int) -> tuple[StateHeader, list[Span], bytes]:
        worker = self._worker
        header, spans = flatten(
            with_state_dicts(state),
            step=step,
            incarnation=self._incarnation,
            rank=worker.rank,
            world_size=worker.world_size,
            layout=worker.layout,
            first=not self._whole,
            moment=Moment(self._number, self._pace.collectives).pack(),
        )
        header = with_families(header, spans, self._families)
        return header, spans, encode_header(header)

    def _start(
        self, header: StateHeader, spans: list[Span], text: bytes, index: int, key: Key, overlap: bool
    ) -> None:
        owned = self._watch.owned(self._families) if overlap else set[int]()
        if overlap and not owned and self._saved:
            why = "no torch optimizer has stepped so far: until one does,"
            if self._watch.in_backward:
                why = "an optimizer steps inside backward:"
            self._say(f"{why} snapshots are copied at the step boundary, not during the next step")
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
            owners=(spans, copies),  # where this is left by an exception, its variables go in any order
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
        self._flight = _Flight(started, index, spans, moving, key, Moment.unpack(header.moment))
        self._trace = Trace(spans)
        self._await(self._flight, urgent=True)
        if not moving:
            self.wait()

    def _await(self, flight: _Flight, *, urgent: bool = False) -> bool:
        """Whether the bytes are there."""
        try:
            flight.native.wait(urgent)
            return True
        except RuntimeError as error:
            self._matches.left_out(flight.key)
            self._cache.slots[flight.index].unlock()
            self._say(f"step {flight.key.step} was not saved: the device did not give its bytes: {error}")
            return False

    def _before_step(self, parameters: Iterator[int]) -> None:
        flight = self._flight
        if flight is not None and any(found in flight.moving for found in parameters):
            self.wait()

    def _say_refused(self, rank: Restoring) -> None:
        for line in rank.refused:
            self._once(line[:_LONGEST_TOPIC], line)

    def _once(self, topic: str, text: str) -> None:
        """Say something that is said once in a job, whichever rank comes to it first."""
        if topic not in self._told:
            self._told.append(topic)
            if self._matches.claim(topic) and self._cache.claim(topic):
                print(f"keepstep: {one_line(text)}", file=sys.stderr, flush=True)

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


def _slot_bytes(header: StateHeader, text: bytes) -> int:
    """Size of a slot for this state, with some spare for later ones."""
    record = Record(header.step, header.incarnation, header.data_bytes, len(text), len(header.storages), 0)
    return slot_bytes(record, spare=True)
