"""The ring's format, and how a ring is made, checked and claimed, in plain Python:
the twin of ``native/ring_format.hpp``."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct

from keepstep.core.errors import RingError

MAGIC, VERSION = 0x474E52505453504B, 1
LEAST, MOST = 64, 1 << 22  # records
HEADER_BYTES = 4096
STREAMS, PROBES, GROUPS, SITES = 4096, 128, 1024, 4096
MOST_GROUPS = 1 << 15  # in a writer's life
ENTERED = 1 << 63
LAPS = (
    MOST_GROUPS // GROUPS - 1
) << 52  # bits of a group's entry that say how often its place was used before
FREED = 1  # key of a stream that was freed
ARENA_BYTES = 1 << 20
BLOCK = 64  # records
MOST_TEXT = 1024
MOST_TICKET = 1 << 62
MOST_MEMBERS = 4 << 20

# Words of the header.
CLAIM, EPOCH, BASE, RANK_WORLD, PID, INCARNATION, MONOTONIC, REALTIME = range(8, 16)
NEXT = 16
DROPPED, LATE, OVERFLOWED, CLOSED, ARENA_USED, FIRST_STEP, WRITERS = range(24, 31)

MASK = (1 << 64) - 1
HALF = (1 << 32) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX = 0xD6E8FEB86659FD93
OFFSET = (1 << 48) - 1  # bits of a time after the start
FAILED = 1 << 48
TAG = MASK ^ ((1 << 49) - 1)
FLAG_FAILED = 4
COLLECTIVE, P2P, PHASE, COMMUNICATOR = 1, 2, 3, 4
SEND, RECEIVE = 10, 11


class Layout:
    """Where things lie, in words."""

    def __init__(self, records: int) -> None:
        self.records = records
        self.streams = HEADER_BYTES // 8
        self.groups = self.streams + STREAMS * 8
        self.sites = self.groups + GROUPS
        self.arena = self.sites + SITES
        self.blocks = self.arena + ARENA_BYTES // 8
        self.slots = (self.blocks + records // BLOCK + 7) // 8 * 8
        self.total_bytes = (self.slots + records * 8) * 8


def fnv1a(data: bytes) -> int:
    h = 2166136261
    for byte in data:
        h = (h ^ byte) * 16777619 & HALF
    return h


def head(layout: Layout) -> bytes:
    words = struct.pack("<4Q", MAGIC, VERSION, layout.records, layout.total_bytes)
    return words + struct.pack("<Q", fnv1a(words))


def checked_layout(head: bytes, file_bytes: int) -> Layout:
    magic, version, records, total, check = struct.unpack("<5Q", head)
    if magic != MAGIC:
        raise RingError("not a keepstep ring (foreign content)")
    if version != VERSION:
        raise RingError(
            f"ring format {version}, this keepstep reads format {VERSION}: use the keepstep version that wrote it"
        )
    if check != fnv1a(head[:32]):
        raise RingError("torn ring: the header does not match its checksum")
    layout = Layout(records) if LEAST <= records <= MOST and records & (records - 1) == 0 else None
    if layout is None or layout.total_bytes != total:
        raise RingError(f"torn ring: the header names impossible sizes ({records} records, {total} bytes)")
    if file_bytes < total:
        raise RingError(f"truncated ring: {file_bytes} of {total} bytes")
    return layout


def create(records: int = 65536) -> int:
    """See ``_native``."""
    if not LEAST <= records <= MOST:
        raise RingError(f"records must be {LEAST} to {MOST}, not {records}")
    layout = Layout(1 << (records - 1).bit_length())
    descriptor = os.memfd_create("keepstep-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, layout.total_bytes)
        os.pwrite(descriptor, head(layout), 0)
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except OSError as error:
        os.close(descriptor)
        raise RingError(f"no memory for a ring of {layout.total_bytes} bytes: {error.strerror}") from None
    return descriptor


class RingFile:
    """A ring's file while it is opened: layout, and whether it can be mapped."""

    def __init__(self, where: str | os.PathLike[str] | int, flags: int) -> None:
        self.name = f"on descriptor {where}" if isinstance(where, int) else os.fspath(where)
        self._owned = not isinstance(where, int)
        with self.errors():
            flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
            self.descriptor = where if isinstance(where, int) else os.open(where, flags)
            try:
                self.layout = self._look()
            except BaseException:
                self.close()
                raise

    def _look(self) -> Layout:
        found = os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise RingError("not a regular file, so not a ring")
        if found.st_size < HEADER_BYTES:
            raise RingError(f"truncated: {found.st_size} bytes, no ring header fits in that")
        return checked_layout(os.pread(self.descriptor, 40, 0), found.st_size)

    def errors(self) -> Errors:
        return Errors(self.name)

    @property
    def mappable(self) -> bool:
        """Only what can never shrink may be mapped: a shrunk file answers a load with SIGBUS."""
        try:
            return bool(fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:
            return False

    def close(self) -> None:
        if self._owned:
            os.close(self.descriptor)


class Errors:
    """Names the ring in whatever is raised."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RingError):
            raise RingError(f"ring {self._name}: {error}") from None
        if isinstance(error, OSError):
            raise RingError(f"ring {self._name}: cannot open: {error.strerror}") from None


def _start_of(pid: int) -> tuple[int, str] | None:
    """Start in clock ticks since boot, and state; None: there is no such process, or it cannot be looked up."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[19]), fields[0]
    except (OSError, ValueError, IndexError):
        return None


def own_claim() -> int:
    found = _start_of(os.getpid())
    return os.getpid() | ((found[0] if found else 0) & HALF) << 32


def claim_lives(claim: int) -> bool:
    """Whether the process that made this claim still runs: a zombie does not, nor does another that got its pid."""
    pid, started = claim & HALF, claim >> 32
    if not 0 < pid <= 0x7FFFFFFF:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        if error.errno == errno.ESRCH:
            return False
    found = _start_of(pid)
    if found is None:
        try:
            os.kill(pid, 0)
        except OSError as error:
            return error.errno == errno.EPERM
        return True
    return found[1] not in "ZX" and started in (0, found[0] & HALF)


def record_check(index: int, start: int, nbytes: int, seq_peer: int, thread_site: int, meta: int) -> int:
    """16 bits over what never changes once a record is published."""
    h = (index + 1) * GOLDEN & MASK
    for value, by in ((start, 29), (nbytes, 7), (seq_peer, 41), (thread_site, 53), (meta & MASK >> 16, 17)):
        value = value * GOLDEN & MASK
        h ^= (value << by | value >> (64 - by)) & MASK
    return (h * MIX & MASK) >> 48
