"""A rank's snapshots: taken at a step boundary, copied at once or during the next forward and backward.

Overlapped, the main thread takes references to the tensors and copies at once what no known optimizer owns (buffers,
random states, averages, plain values); the parameters and optimizer states, which nothing but the optimizer's step
changes, are copied by threads of the native part while training goes on, and waited for just before an optimizer that
owns one of them steps. The threads seal the slot themselves, as soon as the last byte is there.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from keepstep.checkpoint import _native as native  # pyright: ignore[reportMissingModuleSource]
from keepstep.checkpoint.cache import SLOTS_PER_RANK, gib
from keepstep.checkpoint.optimizers import OptimizerWatch
from keepstep.checkpoint.restore import Filling
from keepstep.checkpoint.shelf import Offer, Shelf
from keepstep.checkpoint.slots import Key, agree, newest_common
from keepstep.checkpoint.state import Span, StateHeader, encode_header, flatten, identity
from keepstep.core.errors import CheckpointError

Gather = Callable[[list[int]], list[list[int]]]
"""What every rank of the job gave, by rank; each gives as many numbers."""

PATIENCE_S = 30.0
_POLL_S = 0.001
_SPARE_HEADER_BYTES = 1 << 16
_NOT_POSSIBLE = 2  # a rank's word on its restore, beside 0 (whole) and 1 (damaged)


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank of which job this process plays."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    incarnation: int = 0
    layout: str = ""

    @property
    def one_node(self) -> bool:
        """Whether the node's board tells of every rank of the job."""
        return self.world_size == self.local_world_size


@dataclass(slots=True)
class _Flight:
    """A snapshot that is being copied, and all that must stay as it is meanwhile."""

    native: native.Snapshot
    slot: int
    spans: list[Span]
    moving: set[int]  # storages that are copied in the background


class Snapshots:
    """Saves and restores the state of one rank in its node's cache. Not for use by several threads."""

    def __init__(self, address: str, seat: Seat, gather: Gather, *, slots: int = 2, threads: int = 0) -> None:
        """``gather`` is called by all ranks together. ``threads`` copy; 0: by the CPUs there are.

        Raises:
            CheckpointError: there is no cache at ``address``.
        """
        self._seat, self._gather, self._process = seat, gather, os.getpid()
        self._shelf = Shelf(address, seat.rank, count=slots)
        self._threads = threads or max(1, min(4, len(os.sched_getaffinity(0)) // seat.local_world_size))
        self._begun = self._saved = False
        self._last: Key | None = None
        self._flight: _Flight | None = None
        self._told: set[str] = set()
        self._watch = OptimizerWatch(self._before_step)
        self.skipped = 0

    def register(self, state: Any) -> None:
        """Get memory for snapshots of a state as large as this one; the kernel gives it in the background.

        Raises:
            CheckpointError: the state cannot be saved, or does not fit into the node's memory.
        """
        if not self._shelf.slots:
            header, _, text = self._flatten(state, 0)
            self._make_first_room(_slot_bytes(header, text), header.data_bytes)

    def populated(self) -> None:
        """Wait until all memory that was asked for is there."""
        self._shelf.populated()

    def save(self, state: Any, step: int, *, overlap: bool = True) -> None:
        """Take a snapshot of ``state`` as it is now: ``step`` steps are done. All ranks save the same steps.

        The first call of an incarnation that has not restored is collective. When a slot does not become free within
        30 s, because other ranks do not save, the snapshot is left out and that is said.

        Raises:
            CheckpointError: the state cannot be saved or does not fit; ``step`` is not above the last one.
        """
        if self._process != os.getpid():
            raise CheckpointError("a forked process cannot save: only the one that began to save can")
        self.wait()
        header, spans, text = self._flatten(state, step)
        if not self._begun:
            self._begin_anew()
        key = Key(self._seat.incarnation, step)
        key.pack()
        if self._last is not None and key <= self._last:
            raise CheckpointError(f"step {step} after step {self._last.step}: steps must grow between saves")
        nbytes = _slot_bytes(header, text)
        if not self._shelf.slots:
            self._make_first_room(nbytes, header.data_bytes)
        index = self._slot()
        if index is None:
            self.skipped += 1
            self._say(
                f"step {step} is not kept: after {PATIENCE_S:g} s not all ranks hold a newer snapshot than the oldest "
                "of this rank; do all ranks save the same steps?"
            )
            return
        if self._shelf.slots[index].nbytes < nbytes:
            try:
                self._shelf.make_room(nbytes, index)
            except CheckpointError:
                self._shelf.slots[index].unlock()
                raise
        self._start(header, spans, text, index, key, overlap)
        self._last = key

    def wait(self) -> None:
        """Return when the last snapshot is sealed. Call it before changing saved tensors other than by an optimizer."""
        flight = self._flight
        if flight is not None and self._process == os.getpid():  # a forked child has none of the threads
            flight.native.wait()
            self._shelf.slots[flight.slot].unlock()
            self._flight = None

    def load(self, state: Any) -> int | None:
        """Bring back the newest snapshot that every rank has, into ``state``; its step, or None when none has any.

        Collective. See `restore.Filling` for what becomes of ``state``.

        Raises:
            CheckpointError: there are snapshots, but none that all ranks have whole; or one does not fit ``state``,
                which may be half restored then.
        """
        self.wait()
        offers = self._offers()
        half = ""
        while True:
            rows = self._gather(self._row(set(offers)))
            try:
                key = agree({rank: _keys(row) for rank, row in enumerate(rows)})
            except CheckpointError as error:
                raise CheckpointError(f"{half}{error}") from None
            if key is None:
                self._settle(None)
                if half:
                    raise CheckpointError(
                        f"{half}no snapshot is left: start from the beginning with a fresh process"
                    )
                return None
            found = self._copy(offers[key], state)
            damaged = isinstance(found, Filling) and bool(found.damaged)
            rows = self._gather(
                self._row(set(), int(damaged) if isinstance(found, Filling) else _NOT_POSSIBLE)
            )
            if isinstance(found, CheckpointError):
                raise found
            if any(row[0] == _NOT_POSSIBLE for row in rows):
                raise CheckpointError("another rank could not restore its state: see what it says")
            if not any(row[0] for row in rows):
                break
            half = "the state is half restored, and "
            if damaged:
                self._say(
                    f"the snapshot of rank {self._seat.rank} at step {key.step} is damaged, not restored"
                )
                del offers[key]
        found.finish()
        self._settle(key)
        self._say(f"resumed after step {key.step} from this node's cache", every_rank=False)
        return key.step

    def close(self) -> None:
        """Wait, and let go of the cache, which keeps what it has."""
        self.wait()
        self._watch.close()
        self._shelf.close()

    def _offers(self) -> dict[Key, Offer]:
        offers, refused = self._shelf.offers(self._seat.world_size)
        for line in refused:
            self._say(line)
        return offers

    def _copy(self, offer: Offer, state: Any) -> Filling | CheckpointError:
        """The bytes of a snapshot brought into the state, good or damaged; or why that cannot be."""
        slot = self._shelf.slots[offer.slot]
        if not slot.lock(shared=True):
            return CheckpointError(
                f"rank {self._seat.rank}: its snapshot is being written by another process"
            )
        try:
            filling = Filling(state, offer.header, slot.memory, self._threads)
            filling.copy()
            return filling
        except CheckpointError as error:
            return error
        finally:
            slot.unlock()

    def _make_first_room(self, nbytes: int, data_bytes: int) -> None:
        self._shelf.make_room(nbytes)
        total = sum(slot.nbytes for slot in self._shelf.slots)
        self._say(
            f"{len(self._shelf.slots)} snapshots of rank {self._seat.rank} take {gib(total)} "
            f"({total / max(1, data_bytes):.1f} × its state) of the {gib(self._shelf.limit_bytes)} that the node gives",
            every_rank=False,
        )

    def _begin_anew(self) -> None:
        """Agree with all ranks on what to keep until there is something newer."""
        offers = self._offers()
        rows = self._gather(self._row(set(offers)))
        try:
            self._settle(agree({rank: _keys(row) for rank, row in enumerate(rows)}))
        except CheckpointError as error:
            self._say(str(error), every_rank=False)
            self._settle(None)

    def _settle(self, key: Key | None) -> None:
        self._shelf.settle(key)
        self._last, self._begun = key, True

    def _row(self, keys: set[Key], *numbers: int) -> list[int]:
        found = [*numbers, *sorted(key.pack() for key in keys)]
        return [*found, *[0] * (SLOTS_PER_RANK - len(found))]

    def _slot(self) -> int | None:
        if not self._seat.one_node:
            rows = self._gather(self._row({key for key in self._shelf.held() if key}))
            return self._shelf.take(lambda: newest_common(map(_keys, rows)))
        deadline = time.monotonic() + PATIENCE_S
        while True:
            index = self._shelf.take(self._complete)
            if index is not None or time.monotonic() > deadline:
                return index
            time.sleep(_POLL_S)

    def _complete(self) -> Key | None:
        return newest_common(self._shelf.board.held(rank) for rank in range(self._seat.world_size))

    def _flatten(self, state: Any, step: int) -> tuple[StateHeader, list[Span], bytes]:
        seat = self._seat
        header, spans = flatten(
            with_state_dicts(state),
            step=step,
            incarnation=seat.incarnation,
            rank=seat.rank,
            world_size=seat.world_size,
            layout=seat.layout,
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
        for entry, span in zip(header.storages, spans, strict=True):
            address, urgent = span.pointer, 1
            if span.storage.device.type != "cpu":
                copies.append(span.view().cpu())
                address = copies[-1].data_ptr()
            elif identity(span.storage) in owned:
                moving.add(identity(span.storage))
                urgent = 0
            plan.extend((address, entry.offset, entry.nbytes, urgent))
        started = native.Snapshot(
            self._shelf.slots[index].memory,
            plan,
            header=text,
            data_bytes=header.data_bytes,
            step=key.step,
            incarnation=key.incarnation,
            board=self._shelf.board.memory,
            board_index=self._shelf.board.index(self._seat.rank, index),
            board_value=key.pack(),
            threads=self._threads,
        )
        self._flight = _Flight(started, index, spans, moving)
        started.wait(urgent=True)
        if not moving:
            self.wait()

    def _before_step(self, parameters: Iterator[int]) -> None:
        flight = self._flight
        if flight is not None and any(found in flight.moving for found in parameters):
            self.wait()

    def _say(self, text: str, *, every_rank: bool = True) -> None:
        if text not in self._told and (every_rank or self._seat.rank == 0):
            self._told.add(text)
            print(f"keepstep: {text}", file=sys.stderr, flush=True)


def with_state_dicts(state: Any) -> Any:
    """``state`` with the ``state_dict()`` of every object in it that has one, in dicts, lists and tuples."""
    if hasattr(state, "state_dict") and hasattr(state, "load_state_dict"):
        return state.state_dict()
    if type(state) is dict:
        return {key: with_state_dicts(value) for key, value in cast("dict[Any, Any]", state).items()}
    if type(state) in (list, tuple):
        return type(state)(with_state_dicts(value) for value in state)
    return state


def _slot_bytes(header: StateHeader, text: bytes) -> int:
    """Of a slot for this state and for later ones whose plain values are a little longer."""
    spare = max(_SPARE_HEADER_BYTES, len(text) // 4)
    return native.slot_bytes(header.data_bytes, len(text) + spare, len(header.storages))


def _keys(row: list[int]) -> frozenset[Key]:
    return frozenset(key for key in map(Key.unpack, row) if key is not None)
