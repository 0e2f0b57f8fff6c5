"""The native seam, typed. Tables come as packed bytes; ``reader.py`` holds their numpy types."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import final

@final
class Operation:
    """One operation between its start and its end. Calling it (with anything) stamps the end now."""

    def __call__(self, *_: object) -> None: ...
    def fail(self, *_: object) -> None:
        """End it now, marked FAILED. The first end counts."""

    def waiting(self, *_: object) -> None:
        """The caller begins to wait for it now. The first call counts."""

    @property
    def seq(self) -> int:
        """Sequence number in its stream, from 1; 0 when it has none."""

    @property
    def ended(self) -> bool:
        """Whether its end was stamped."""

def create(records: int = 65536) -> int:
    """A new ring in a memfd, size sealed; the descriptor, which the caller closes.

    ``records`` is rounded up to a power of two, 64 to 4,194,304. Raises RingError when there is no memory for it.
    """

class RingWriter:
    """Writes one rank's ring. Claims it for this process, or joins this process's claim: RingError when it cannot.

    After construction ``start`` and ``Operation`` never raise, and wait for no other process; a forked child's calls do
    nothing.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | int,
        *,
        rank: int,
        world_size: int,
        incarnation: int = 0,
        join: bool = False,
    ) -> None: ...
    def group(self, name: str, members: Sequence[int], backend: str, desc: str) -> int:
        """Id of a process group, the same for the same properties; -1 when the table is full (counted)."""

    def retire(self, group: int) -> None:
        """No operation will be started on this group: its place in a full table, not its id, may be used again."""

    def site(self, text: str) -> int:
        """Id of a call site, the same for the same text; 0 (unknown site) when the table is full (counted)."""

    def start(
        self,
        kind: int,
        op: int,
        group: int = -1,
        peer: int = -1,
        nbytes: int = 0,
        flags: int = 0,
        site: int = 0,
    ) -> Operation:
        """Publish the start of an operation. What finds no slot, or does not fit its field, is dropped and counted."""

    def begins_at(self, step: int) -> None:
        """The training goes on from ``step``: readers count its iterations from there. Said before the first."""

    def close(self) -> None:
        """No more records; tells readers that the end was orderly. The claim stays until this object goes."""

    @property
    def dropped(self) -> int:
        """Records that found no slot so far."""

    @property
    def incarnation(self) -> int:
        """As given, or one more than the dead writer's whose ring this one took over."""

    @property
    def writable(self) -> bool:
        """False after ``close`` and in a forked child."""

class Reader:
    """The scans behind ``keepstep.ring.RingReader``."""

    def __init__(self, where: str | os.PathLike[str] | int) -> None: ...
    def poll(
        self, apart: int = 0, kept: int = 0
    ) -> tuple[bytearray | None, bytearray | None, int, int, bytearray | None]:
        """What has begun and what has ended, how much is lost, how much never ended, and what is ``apart``.

        ``apart``: records with such a flag are left out; those of them that have ended with a flag of ``kept`` come
        last.
        """

    def snapshot(self, only_in_flight: bool) -> bytearray: ...
    def streams(self) -> bytearray: ...
    def groups(self) -> list[tuple[str, tuple[int, ...], str, str] | None]: ...
    def sites(self) -> list[str]: ...
    def header(self) -> tuple[int, int, int, int, int, int, int, bool, int, int, int, int]: ...
    def content(self) -> bytearray: ...
    def writer_lives(self) -> bool: ...
