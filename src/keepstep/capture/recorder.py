"""The worker's side of the ring, which is claimed at the first record and given up if that fails."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from keepstep.core.events import WORLD_PEER, Kind, Phase
from keepstep.ring import Operation, RingWriter

NO_GROUP = -1
PHASE = int(Kind.PHASE)
MAX_STUMBLES = 32
_ONE_EACH = "keepstep watches one process for each that --nproc-per-node starts"


Start = Callable[[int, int, int, int, int, int, int], Operation]


def open_ring() -> RingWriter:
    """Claim the ring that the launcher made for this rank. Raises RingError, KeyError or ValueError."""
    return RingWriter(
        os.environ["KEEPSTEP_RING"],
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        incarnation=int(os.environ.get("KEEPSTEP_INCARNATION", "0")),
        join=True,  # the NCCL shim may already have claimed the ring for this process
    )


def harmless(method: Callable[..., None]) -> Callable[..., None]:
    """Decorates methods that torch calls: their exceptions go to ``self.recorder`` instead of into the training."""

    @wraps(method)
    def guarded(self: Any, *args: Any) -> None:
        try:
            method(self, *args)
        except Exception as error:
            self.recorder.stumbled(error)

    return guarded


class Recorder:
    """Starts records while the process is watched.

    ``start`` is the ring's own function while recording and None otherwise. Callers check it first, so that an
    unwatched process (a helper, a forked child, or any process before its first record) runs nothing else of the probe.
    """

    def __init__(self, open_writer: Callable[[], RingWriter] = open_ring) -> None:
        self.start: Start | None = None
        self.writer: RingWriter | None = None
        self.given_up = False
        self.stumbles = 0
        self.thread = 0  # the training thread: it made the first group or was the last to step an optimizer
        self.on_give_up: Callable[[], None] = lambda: None
        # Lines for readers of the ring, written into its sites table when it is claimed.
        self.notes: Iterable[str] = ()
        self._open_writer = open_writer
        self._paused = False
        self._claiming = threading.Lock()
        self._told = False  # the user knows that this process is not watched

    def claim(self) -> bool:
        """Open the ring if that was not tried yet; True if this process is watched. Never raises."""
        if self.writer is not None:
            return True
        with self._claiming:
            if self.writer is None and not self.given_up:
                self._open()
        return self.writer is not None

    def _open(self) -> None:
        try:
            self.writer = self._open_writer()
            for note in self.notes:
                self.writer.site(note)
        except Exception as error:
            taken = f"; {_ONE_EACH}" if "claimed by process" in str(error) else ""
            self.give_up(f"{type(error).__name__}: {error}{taken}")
            return
        self.thread = threading.get_ident()
        if not self._paused:
            self.start = self.writer.start

    def give_up(self, reason: str) -> None:
        """Stop recording for good and tell the user once; the training goes on."""
        if self._told:
            return
        self._told = True
        self.stop()
        print(f"keepstep: this process trains unwatched: {reason}", file=sys.stderr, flush=True)
        self.on_give_up()

    def stumbled(self, error: Exception) -> None:
        """Count an error that kept the probe from recording, and write it into the ring for its readers."""
        self.stumbles += 1
        if self.writer is not None and self.stumbles <= MAX_STUMBLES:
            self.writer.site(f"keepstep: not recorded: {type(error).__name__}: {error}")

    def stop(self) -> None:
        """Record nothing more. Also called in a forked child, because the ring belongs to its parent."""
        self.given_up = True
        self.start = None
        self.writer = None

    def begins_at(self, step: int) -> None:
        """Note in the ring that the training goes on from ``step``. Never raises."""
        if self.claim() and self.writer is not None:
            try:
                self.writer.begins_at(step)
            except Exception as error:
                self.stumbled(error)

    def renew(self) -> None:
        """Close the ring. The next record claims the ring that the environment then names."""
        writer, self.writer, self.start = self.writer, None, None
        if writer is not None:
            writer.close()
            self.given_up, self._told, self.stumbles = False, False, 0

    def pause(self, paused: bool) -> None:
        """Stop recording or start it again; the ring stays claimed."""
        self._paused = paused
        self.start = None if paused or self.writer is None else self.writer.start

    def phase(self, phase: Phase) -> Operation | None:
        """Start a phase record; None while not recording."""
        start = self.start
        return None if start is None else start(PHASE, phase, NO_GROUP, WORLD_PEER, 0, 0, 0)
