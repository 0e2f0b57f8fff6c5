"""A link between the devices of two held ranks, over a communicator of NCCL that only these two know of.

NCCL and CUDA's driver are called as libraries. torch knows nothing of the communicator: no process group, no watchdog
and no flight recorder has it. Nor has keepstep's shim, which stands before linked callers only. Nothing of the
training's is used, so it does not matter how the communicator ends: it is always aborted.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

from keepstep.core.errors import KeepstepError

MESSAGES = 3  # messages of one size in a row, of which the best counts
ID_BYTES = 128
FREE_BYTES = 1 << 30
"""So much of the device has to be free: for one message, and some hundred MB for what NCCL takes."""
NO_MEMORY = "no free memory for the test of links"
SET_UP_S = 1.5  # for NCCL to make the communicator
_NAME = b"keepstep"
"""The communicator's name, by which our profiler plugin leaves it out."""
_SUCCESS, _IN_PROGRESS, _INT8 = 0, 7, 0
_UNDEFINED = -(1 << 31)
_LOOK_S = 0.0005
_LEFT_S = 1.0  # after an abort; memory that a message is still going to or from is rather lost than freed
_NON_BLOCKING = 1
# Set, they take a communicator of ours to an address of the training's, or let its making block.
_UNFIT_SETTINGS = ("NCCL_COMM_ID", "NCCL_COMM_BLOCKING")
_CALLED = ("ncclMemAlloc", "ncclCommInitRankConfig", "ncclCommAbort")  # all are there from NCCL 2.19 on


class LinkError(KeepstepError):
    """A link that cannot be tested on the devices."""


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.27. Others read as much of it as they know."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("comm_name", ctypes.c_char_p),
    )


def trains_over_nccl(device: str) -> bool:
    """Whether the job's ranks compute on GPUs and exchange over NCCL."""
    import torch.distributed as dist

    if not device.startswith("cuda") or not dist.is_available() or not dist.is_initialized():
        return False
    return "nccl" in dist.get_backend_config()


def why_not(device: str) -> str:
    """Why links of such a device cannot be tested on it now; "": they can."""
    import torch

    library = _nccl()
    if library is None or not all(hasattr(library, name) for name in _CALLED):
        return "NCCL 2.19 or newer is not loaded"
    if unfit := [name for name in _UNFIT_SETTINGS if name in os.environ]:
        return f"{unfit[0]} is set"
    try:
        free, _ = torch.cuda.mem_get_info(device)
    except RuntimeError as error:
        return str(error)
    return "" if free >= FREE_BYTES else NO_MEMORY


def new_id() -> bytes:
    """What the two ends of a link find each other by. Raises LinkError."""
    made = _Id()
    _check("ncclGetUniqueId", _library().ncclGetUniqueId(ctypes.byref(made)))
    return bytes(memoryview(made))


class DeviceLink:
    """This rank's end of a link. No call of NCCL's blocks, and each wait ends when ``running`` does.

    Use it in one thread, whose device it sets.
    """

    def __init__(self, device: str, place: int, most_bytes: int, running: Callable[[], bool]) -> None:
        """``place``: 0 for the target, 1 for the source; messages have at most ``most_bytes``."""
        self._device, self._running = device, running
        self._place, self._most_bytes = place, most_bytes
        self._library = _library()
        self._comm, self._buffer = ctypes.c_void_p(), ctypes.c_void_p()

    def set_up(self, identity: bytes, until_s: float) -> None:
        """Make the communicator, as the other end does at the same time. Raises LinkError."""
        import torch

        torch.cuda.set_device(self._device)
        self._stream, self._stream_number = _stream(self._device)
        config = _Config(
            ctypes.sizeof(_Config), 0xCAFEBEEF, 22700, 0, *[_UNDEFINED] * 3, None, *[_UNDEFINED] * 2, _NAME
        )
        made = self._library.ncclCommInitRankConfig(
            ctypes.byref(self._comm), 2, _Id.from_buffer_copy(identity), self._place, ctypes.byref(config)
        )
        self._settle("ncclCommInitRankConfig", made, until_s)
        _check(
            "ncclMemAlloc",
            self._library.ncclMemAlloc(ctypes.byref(self._buffer), ctypes.c_size_t(self._most_bytes)),
        )

    def enqueue(self, nbytes: int, until_s: float) -> list[Any]:
        """Enqueue messages of this size, from the source to the target; returns an event before each, and one behind.

        Raises LinkError when the other end does not come.
        """
        import torch

        call = "ncclSend" if self._place else "ncclRecv"
        events = [torch.cuda.Event(enable_timing=True) for _ in range(MESSAGES + 1)]
        events[0].record(self._stream)
        for event in events[1:]:
            result = getattr(self._library, call)(
                self._buffer,
                ctypes.c_size_t(nbytes),
                _INT8,
                1 - self._place,
                self._comm,
                ctypes.c_void_p(self._stream_number),
            )
            self._settle(call, result, until_s)
            event.record(self._stream)
        return events

    def speed(self, nbytes: int, events: list[Any], until_s: float) -> float:
        """Bytes per second of the best of the enqueued messages that came in time; 0: none did."""
        self._wait(events[-1].query, until_s)
        came = [event for event in events if event.query()]
        times_ms = [before.elapsed_time(after) for before, after in pairwise(came)]
        return nbytes / max(min(times_ms) * 1e-3, 1e-9) if times_ms else 0.0

    def close(self) -> None:
        """Abort the communicator, whatever is under way on it, and give its memory back once the device has left it."""
        if self._comm:
            self._library.ncclCommAbort(self._comm)
            self._comm = ctypes.c_void_p()
        until_s = time.monotonic() + _LEFT_S
        while self._buffer and time.monotonic() < until_s:
            if self._stream.query():
                self._library.ncclMemFree(self._buffer)
                self._buffer = ctypes.c_void_p()
            else:
                time.sleep(_LOOK_S)

    def _settle(self, call: str, result: int, until_s: float) -> None:
        """Wait until what was called has been done on this host."""
        state = ctypes.c_int(result)

        def settled() -> bool:
            _check(
                "ncclCommGetAsyncError", self._library.ncclCommGetAsyncError(self._comm, ctypes.byref(state))
            )
            return state.value != _IN_PROGRESS

        if result == _IN_PROGRESS and not self._wait(settled, until_s):
            raise LinkError(f"{call} was not done in time")
        _check(call, state.value)

    def _wait(self, done: Callable[[], bool], until_s: float) -> bool:
        while not done():
            if not self._running() or time.monotonic() >= until_s:
                return False
            time.sleep(_LOOK_S)
        return True


@cache
def _nccl() -> Any:
    """NCCL as it is loaded, or None. Its functions are found past keepstep's shim."""
    try:
        return ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
    except OSError:
        return None


def _library() -> Any:
    library = _nccl()
    if library is None:
        raise LinkError("NCCL is not loaded")
    return library


@cache
def _stream(device: str) -> tuple[Any, int]:
    """A stream of our own, one for all tests of the process: those of torch's pool are the training's, too."""
    import torch

    made = ctypes.c_void_p()
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError as error:
        raise LinkError("CUDA's driver is not loaded") from error
    if driver.cuStreamCreate(ctypes.byref(made), _NON_BLOCKING) != 0 or not made.value:
        raise LinkError("CUDA made no stream")
    return torch.cuda.ExternalStream(made.value, device=device), made.value


def _check(call: str, result: int) -> None:
    if result not in (_SUCCESS, _IN_PROGRESS):
        raise LinkError(f"{call} failed with {result}")
