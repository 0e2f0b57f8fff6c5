"""The stand-in's device, for the job that runs on it: launch times, faults, marks, counts.

Only the rank that calls is concerned, but for ``cut`` and ``slow_pair``. Launch times and errors hold for what is
launched from then on, so a host that runs ahead may set them at the beginning of a step.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

Kind = Literal["gemm", "reduction", "optimizer", "copy", "other"]
Counter = Literal["launches", "events", "synchronizations", "queries", "stream_waits", "communications"]
ILLEGAL_ADDRESS, ECC = 700, 214
MOST_RANKS = 16
COUNTERS: tuple[Counter, ...] = (
    "launches", "events", "synchronizations", "queries", "stream_waits", "communications",
)  # fmt: skip
_CUT, _SLOW = 0, MOST_RANKS * MOST_RANKS * 4
_PROGRESS = 2 * MOST_RANKS * MOST_RANKS * 4
_HOLDERS = _PROGRESS + 3 * MOST_RANKS * 8
_LINKS_FAILED = _HOLDERS + 16 * 32 * 24
CONTROL_BYTES = _LINKS_FAILED + 4 * MOST_RANKS


def compute_values() -> None:
    """Let torch's operators compute from here on, if ``STAND_IN_VALUES`` names the library for it.

    Without it they launch their kernels, which take their time and leave the memory as it is, mostly zeros. Objects
    between ranks, pipelining's and a checkpoint's plan among them, need values.
    """
    library = os.environ.get("STAND_IN_VALUES")
    if library:
        import torch

        torch.ops.load_library(library)


@cache
def is_stand_in() -> bool:
    """Whether CUDA's driver is the stand-in in this process."""
    try:
        Device()
    except OSError:
        return False
    return True


class Progress(NamedTuple):
    """How many operations of NCCL a rank has called, come to on its device, and seen the end of."""

    enqueued: int
    started: int
    completed: int


class Control:
    """The file that the ranks of a job share, laid out in native/tests/stand_in_gpu/control.hpp.

    Zero bytes are a healthy machine, of which nothing has run yet.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), CONTROL_BYTES)

    def cut(self, source: int, target: int, on: bool = True) -> None:
        """Let nothing through from rank ``source`` of the job to rank ``target``."""
        self._put(_CUT, source, target, int(on))

    def slow_pair(self, source: int, target: int, percent: int) -> None:
        """Let what goes from rank ``source`` to rank ``target`` take ``percent`` longer."""
        self._put(_SLOW, source, target, percent)

    def progress(self, rank: int) -> Progress:
        """Of this rank of the job, over all its communicators and incarnations."""
        return Progress(
            *(
                struct.unpack_from("q", self._memory, _PROGRESS + 8 * (MOST_RANKS * i + rank))[0]
                for i in range(3)
            )
        )

    def _put(self, table: int, source: int, target: int, value: int) -> None:
        struct.pack_into("i", self._memory, table + 4 * (source * MOST_RANKS + target), value)


class Device:
    """The stand-in in this process. Raises ``OSError`` where CUDA's driver is not the stand-in."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        if not hasattr(self._library, "stand_in_counter"):
            raise OSError("libcuda.so.1 is not the stand-in: LD_LIBRARY_PATH has to name its folder")
        self._library.stand_in_counter.restype = ctypes.c_int64
        self._library.stand_in_stream_counter.restype = ctypes.c_int64

    def kernel_us(self, us: float, kind: Kind | None = None) -> None:
        """Let kernels of this kind, or all, take ``us`` microseconds."""
        name = None if kind is None else kind.encode()
        if self._library.stand_in_kernel_us(name, ctypes.c_double(us)) != 0:
            raise ValueError(f"no kind of kernels is called {kind!r}")

    def slow_down(self, factor: float) -> None:
        """Let every kernel take ``factor`` times as long as it was said to; 1: as healthy."""
        self._library.stand_in_kernel_factor(ctypes.c_double(factor))

    def hang_next(self, kind: Kind | None = None) -> None:
        """Let the next kernel of this kind, or the next of all, never end."""
        self._library.stand_in_hang_next(None if kind is None else kind.encode())

    def fail_next(self, error: int, kind: Kind | None = None) -> None:
        """Let the next kernel fail with this error of CUDA's; all calls say so from then on."""
        self._library.stand_in_fail_next(None if kind is None else kind.encode(), error)

    def fail(self, error: int) -> None:
        """Let the device have failed now; 0: it is whole again."""
        self._library.stand_in_fail(error)

    def host_works(self, seconds: float) -> None:
        """Let the host have worked so long, where the clock is virtual; nobody waits."""
        self._library.stand_in_host_ns(ctypes.c_int64(int(seconds * 1e9)))

    def mark(self, stream: int, tag: int) -> None:
        """Write down the device's time when ``stream`` gets there: the log's ``marks``."""
        self._library.stand_in_mark(ctypes.c_void_p(stream), ctypes.c_int64(tag))

    def cut(self, stream: int, source: int, target: int, on: bool = True) -> None:
        """What ``Control.cut`` does, when ``stream`` gets there; all ranks are concerned."""
        self._library.stand_in_pair(ctypes.c_void_p(stream), 0, source, target, int(on))

    def fail_links(self, stream: int, rank: int) -> None:
        """Let links of a rank fail when ``stream`` gets there: its communicators say so, and get nothing any more.

        What it sends to the others still comes. Communicators that are made later are whole.
        """
        self._library.stand_in_fail_links(ctypes.c_void_p(stream), rank)

    def slow_pair(self, stream: int, source: int, target: int, percent: int) -> None:
        """What ``Control.slow_pair`` does, when ``stream`` gets there; all ranks are concerned."""
        self._library.stand_in_pair(ctypes.c_void_p(stream), 1, source, target, percent)

    def count(self, what: Counter) -> int:
        """How often the process has done this."""
        return self._library.stand_in_counter(COUNTERS.index(what))

    def waits_of(self, stream: int) -> tuple[int, int]:
        """How many waits for events were put on a stream, and how often the host has waited for what is on it."""
        at = ctypes.c_void_p(stream)
        put, awaited = (self._library.stand_in_stream_counter(at, which) for which in range(2))
        return put, awaited

    def counts(self) -> Mapping[str, int]:
        """How often the process has done each of these."""
        return {name: self.count(name) for name in COUNTERS}
