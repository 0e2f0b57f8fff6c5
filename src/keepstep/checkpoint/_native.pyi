"""The native seam, typed. A plan is packed numbers, ``array('Q')``; what copies runs without the GIL."""

from __future__ import annotations

from typing_extensions import Buffer

DATA_OFFSET: int
"""Where the storages' bytes begin in a slot."""
MAGIC: int

def checksum(data: Buffer, before: int = 0) -> int:
    """CRC-64/NVME of the bytes whose checksum is ``before`` (0: none) followed by ``data``."""

def combine(first: int, second: int, nbytes: int) -> int:
    """The checksum of a part with ``first`` followed by one of ``nbytes`` bytes with ``second``."""

def checksums(source: Buffer, plan: Buffer, threads: int = 1) -> list[int]:
    """The checksum of each piece of ``source``; ``plan``: offset, nbytes of each. ValueError: one lies outside."""

def copy_out(source: Buffer, plan: Buffer, threads: int = 1, fresh: bool = False) -> list[int]:
    """Copy pieces of ``source`` to memory; ``plan``: offset, address, nbytes of each.

    ``fresh``: that memory was not touched yet: the kernel gives its pages many at once, in less time. Gives the
    checksums of the bytes that were copied. The caller answers for the addresses. ValueError: a piece lies outside
    ``source``.
    """

URGENT: int
ON_DEVICE: int
"""Bits of a piece in the plan of a `Snapshot`."""

def has_cuda() -> bool:
    """Whether pieces on a device can be copied: CUDA's driver is loaded, as it is once torch uses a GPU."""

def clear(slot: Buffer) -> None:
    """Make a slot say nothing."""

def populate(memory: Buffer, begin: int, nbytes: int) -> None:
    """Have the kernel give pages to a part of ``memory`` now; changes no byte."""

def slot_bytes(data_bytes: int, header_bytes: int, storages: int) -> int:
    """Bytes of a slot that just holds these."""

class Snapshot:
    """A slot being filled by threads of its own, and sealed by them when every byte is there.

    ``plan``: address, offset in the data, nbytes, bits of each storage, in the order of ``header``; URGENT ones are
    copied first. Those ON_DEVICE have addresses of the thread's CUDA context; they are read once ``stream`` has done
    what is on it now. ``owners``, objects that keep that memory alive, are held until nothing is copied any more; the
    caller keeps it unchanged until ``wait``. After the seal this
    process's lock on the file ``lock`` is given up (-1: there is none), then the word ``board_index`` of ``board``
    (64 bits each) gets ``board_value``. ValueError: a piece does not fit into the slot. RuntimeError: no CUDA.
    """

    def __init__(
        self,
        slot: Buffer,
        plan: Buffer,
        *,
        owners: object = None,
        header: bytes,
        data_bytes: int,
        step: int,
        incarnation: int,
        lock: int = -1,
        board: Buffer | None = None,
        board_index: int = 0,
        board_value: int = 0,
        threads: int = 1,
        stream: int = 0,
    ) -> None: ...
    def wait(self, urgent: bool = False) -> None:
        """Wait until all is copied and sealed, or only the ``urgent`` storages are copied.

        RuntimeError: the device did not give its bytes, and why; then nothing is sealed.
        """

    def sums(self) -> list[int]:
        """The checksums of the storages; waits for them."""

    @property
    def finished(self) -> bool:
        """Whether the slot is sealed."""
