"""A trace of the next few steps by torch's profiler, begun and ended where an optimizer step ends.

Nothing of this is imported, and no step looks for it, before an operator orders one. Whatever fails is reported and
never reaches the training; a script that uses a profiler of torch itself keeps it, and there is no trace then.
"""

from __future__ import annotations

import atexit
import gc
import gzip
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.autograd import profiler as autograd_profiler

from keepstep.capture.recorder import Recorder
from keepstep.core.events import Phase
from keepstep.ring.orders import KNOCK, Word

if TYPE_CHECKING:
    from keepstep.ring.orders import OrdersPage

MOST_BYTES = 256 << 20  # the longest file of a trace
_LEAST_FREE_BYTES = 1 << 30  # on the disk, to begin with
_CHUNK_BYTES = 1 << 20
_GZIP_LEVEL = 3
_AT_EXIT_S = 20.0  # longest wait at the end of the process for a file that is being written
_STATES = 8  # reports on one order have numbers from `number * _STATES` on
_OWN = "the script uses torch's profiler itself"
_ours: WeakSet[Any] = WeakSet()  # profilers of earlier traces, which may live until garbage is collected
_HOOKED = ("_prepare_profiler", "_enable_profiler")  # what begins any profiler of torch


class EveryStep:
    """The words of an orders page while a trace is under way: they look as if something was ordered at every step."""

    __slots__ = ("_words",)

    def __init__(self, words: Any) -> None:
        self._words = words

    def __getitem__(self, index: int) -> int:
        return self._words[index] or (KNOCK if index == Word.ORDER else 0)

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value


@dataclass(frozen=True, slots=True)
class _Order:
    """What the agent has written on the page.

    Attributes:
        number: the order's.
        steps: iterations to trace, each of ``per_step`` optimizer steps.
        base_step, base_count: a past iteration, and the optimizer steps made when it ended.
        until_ns: time on CLOCK_MONOTONIC at which the trace ends in any case, and before which it has to begin.
        folder: where the file goes.
        rank: the rank that this process plays.
    """

    number: int
    steps: int
    per_step: int
    base_step: int
    base_count: int
    until_ns: int
    folder: str
    rank: int

    def step_after(self, count: int) -> int:
        """The iteration that begins when so many optimizer steps are made."""
        return self.base_step + 1 + max(count - self.base_count, 0) // self.per_step


class StepTrace:
    """One trace of this process. All methods are called at the end of an optimizer step, in the thread that made it."""

    def __init__(self, page: OrdersPage, recorder: Recorder, order: _Order, count: int) -> None:
        self._page, self._recorder, self._order = page, recorder, order
        self._reports = 0
        self._until_count = count + order.steps * order.per_step
        self._thread = threading.get_ident()
        self._profile: Any = None
        self._originals: dict[str, Any] = {}
        self._disturbed = ""
        self.first_step = order.step_after(count)

    @classmethod
    def ordered(cls, page: OrdersPage, recorder: Recorder, count: int) -> StepTrace | None:
        """Begin the trace that is ordered on the page, after ``count`` optimizer steps; None where none is begun."""
        found = page.trace.newest()
        if found is None:
            return None
        number, body = found
        try:
            order = _Order(number, rank=int(os.environ.get("RANK", "0")), **body)
        except TypeError:
            return None
        trace = cls(page, recorder, order, count)
        if time.monotonic_ns() >= order.until_ns:
            return None
        with trace._held():
            why = trace._begin()
        trace._report("failed" if why else "tracing", why=why)
        return None if why else trace

    def step(self, count: int) -> bool:
        """Go on after ``count`` optimizer steps; True: the trace is over."""
        is_late = time.monotonic_ns() >= self._order.until_ns
        if self._disturbed:
            self._end()
            self._report("failed", why=self._disturbed)
            return True
        if count < self._until_count and not is_late:
            return False
        if threading.get_ident() != self._thread:
            return False  # only the thread that has begun a profiler can end it
        with self._held():
            results, why = self._end()
        if why:
            self._report("failed", why=why)
            return True
        self._report("writing")
        writer = threading.Thread(
            target=_harmless(lambda: self._write(results)), name="keepstep-trace", daemon=True
        )
        writer.start()
        atexit.register(writer.join, _AT_EXIT_S)
        return True

    def give_up(self, why: str) -> None:
        """End the trace without a file."""
        self._end()
        self._report("failed", why=why)

    def _held(self) -> Any:
        """Mark what the profiler takes to begin or end as a hold, which is no part of an iteration."""
        return _Phase(self._recorder)

    def _begin(self) -> str:
        """Start the profiler; why it cannot be started, or ""."""
        try:
            if why := _in_the_way() or self._no_room():
                return why
            from torch.profiler import ProfilerActivity

            wanted = {ProfilerActivity.CPU}
            if torch.cuda.is_initialized():
                wanted.add(ProfilerActivity.CUDA)
            activities = wanted & set(torch.profiler.supported_activities())
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()
            _ours.update((self._profile, self._profile.profiler))
            self._stand_aside()
        except Exception as error:
            self._end()
            return f"the profiler failed: {_in_a_line(error)}"
        return ""

    def _end(self) -> tuple[Any, str]:
        """Stop the profiler: what it has recorded; or None, and why."""
        self._stand_back()
        profile, self._profile = self._profile, None
        if profile is None:
            return None, self._disturbed or "it was not begun"
        try:
            profile.stop()
            return profile.profiler.kineto_results, ""
        except Exception as error:
            return None, f"the profiler failed: {_in_a_line(error)}"

    def _stand_aside(self) -> None:
        """From now on, end this trace when the script begins a profiler: there can be one only."""
        for name in _HOOKED:
            original = getattr(autograd_profiler, name, None)
            if original is None:
                continue
            self._originals[name] = original
            setattr(autograd_profiler, name, self._giving_way(original))

    def _giving_way(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def begin(*args: Any, **kwargs: Any) -> Any:
            self._disturbed = f"{_OWN}, and has begun to meanwhile"
            if threading.get_ident() == self._thread:
                self._end()
            return original(*args, **kwargs)

        return begin

    def _stand_back(self) -> None:
        for name, original in self._originals.items():
            setattr(autograd_profiler, name, original)
        self._originals.clear()

    def _no_room(self) -> str:
        os.makedirs(self._order.folder, mode=0o700, exist_ok=True)
        found = os.statvfs(self._order.folder)
        free = found.f_bavail * found.f_frsize
        if free < _LEAST_FREE_BYTES:
            return f"{self._order.folder}: only {free >> 20} MiB are free there, a trace takes up to 1 GiB"
        return ""

    def _write(self, results: Any) -> None:
        """Write the file, in a thread beside the training: it appears whole or not at all."""
        name = f"rank-{self._order.rank:05d}-step-{self.first_step}.json.gz"
        path = os.path.join(self._order.folder, name)
        plain, packed = f"{path}.{os.getpid()}.json", f"{path}.{os.getpid()}.part"
        told: dict[str, Any]
        try:
            told = self._written(results, plain, packed, path)
        except Exception as error:
            told = {"state": "failed", "why": f"the file cannot be written: {_in_a_line(error)}"}
        for left in (plain, packed):  # before it is told, so that who is told finds nothing half-done
            with suppress(OSError):
                os.unlink(left)
        self._report(**told)

    def _written(self, results: Any, plain: str, packed: str, path: str) -> dict[str, Any]:
        """Write the file under names of its own first; what is to be reported."""
        results.save(plain)
        if not _is_whole(plain):
            why = "the profiler has not written all of the file: is the disk full?"
            return {"state": "failed", "why": why}
        nbytes = _pack(plain, packed)
        if nbytes > MOST_BYTES:
            why = f"the file is larger than {MOST_BYTES >> 20} MiB: trace fewer steps"
            return {"state": "failed", "why": why}
        os.replace(packed, path)
        return {"state": "written", "file": f"traces/{os.path.basename(path)}", "nbytes": nbytes}

    def _report(self, state: str, *, why: str = "", file: str = "", nbytes: int = 0) -> None:
        why = why[:200].encode("ascii", "replace").decode()  # because the page has little room
        body = {"state": state, "step": self.first_step, "file": file, "nbytes": nbytes, "why": why}
        with suppress(Exception):  # the page may be gone, as where another incarnation begins
            self._page.traced.put(self._order.number * _STATES + self._reports, body)
        self._reports = min(self._reports + 1, _STATES - 1)


class _Phase:
    """Records what is done inside as a hold."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._record: Any = None

    def __enter__(self) -> None:
        self._record = self._recorder.phase(Phase.HOLD)

    def __exit__(self, *_: object) -> None:
        if self._record is not None:
            self._record()


def _in_the_way() -> str:
    """Why no profiler may be begun: the script has one, at work or between two of its cycles; "": none is there."""
    is_enabled = vars(torch.autograd).get("_profiler_enabled")
    if is_enabled is not None and is_enabled():
        return _OWN
    if _of_the_script():
        gc.collect()  # profilers are cycles: one that was used and let go lives until then
        if _of_the_script():
            return _OWN
    return ""


def _of_the_script() -> bool:
    """Whether there is a profiler that is none of ours."""
    names = ("profile", "_KinetoProfile")
    known = (vars(torch.profiler)[name] for name in names if name in vars(torch.profiler))
    kinds = (*known, autograd_profiler.profile, autograd_profiler.emit_nvtx)
    # `isinstance` would ask proxies of the script for their class, and run its code.
    return any(issubclass(type(one), kinds) and one not in _ours for one in gc.get_objects())


def _is_whole(path: str) -> bool:
    """Whether the JSON object ends where the file does."""
    with open(path, "rb") as file:
        file.seek(max(os.path.getsize(path) - 64, 0))
        return file.read().rstrip().endswith(b"}")


def _pack(plain: str, packed: str) -> int:
    """Compress a file as far as the limit; the size of the compressed one. The file is read in chunks."""
    with open(plain, "rb") as source, open(packed, "wb", opener=_private) as target:
        with gzip.GzipFile(
            fileobj=target, mode="wb", compresslevel=_GZIP_LEVEL, filename="", mtime=0
        ) as file:
            while chunk := source.read(_CHUNK_BYTES):
                file.write(chunk)
                if target.tell() > MOST_BYTES:
                    break
        return target.tell()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _in_a_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:150]}"


def _harmless(work: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        with suppress(Exception):
            work()

    return run
