"""A device under load for a while, as a program of its own: matrix products and its memory, every result compared.

``python -m keepstep.validate.burn_in cuda:3 60`` prints a `Burnt` as JSON. The factors hold small whole numbers, so
that every partial sum is exact: whatever the order of summation, a sound device gives the same bits, product after
product, and some rows of the first are compared with the host's own.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from keepstep.core.node_memory import available_bytes
from keepstep.core.node_row import Burnt
from keepstep.core.validation import DeviceFigure

MOST_S = 24 * 3600.0
_SLICE_S = 0.5  # how long products are made before memory is tested, and so on
_ROWS = 4  # rows of the first product that the host computes as well
_GPU_SIZE, _CPU_SIZE = 8192, 512
_AT_ONCE = 8  # products between two looks at the clock
_GPU_SHARE, _CPU_SHARE = 0.8, 0.125  # the share of free memory that is tested
_MOST_CPU_BYTES = 1 << 30
_GPU_BLOCK_BYTES, _CPU_BLOCK_BYTES = 256 << 20, 64 << 20
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: each word of the memory holds another number
_MOST_ERRORS = 8
_LARGEST = 3  # 8192 products of such numbers are exact in 32 bits


def burn_in(device: str, seconds: float) -> Burnt:
    """Keep a device busy for so long, comparing all that it computes and keeps.

    Raises what torch raises where the device cannot be used at all.
    """
    import torch

    # Partial sums must not be rounded to the format of the result.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    on_gpu = device.startswith("cuda")
    number = int(device.partition(":")[2] or 0) if on_gpu else 0
    model = torch.cuda.get_device_name(device) if on_gpu else f"{torch.get_num_threads()} threads"
    result = Burnt(f"GPU {number}" if on_gpu else "CPU", model[:60])
    begun_s = time.monotonic()
    products = _Products(number, device)
    memory = _Memory(number, device)
    errors: list[str] = []
    while True:
        for part in (products, memory):
            until_s = min(time.monotonic() + _SLICE_S, max(begun_s + seconds, time.monotonic() + 0.01))
            errors += part.run(until_s)
        if time.monotonic() - begun_s >= seconds or len(errors) >= _MOST_ERRORS:
            break
    errors += memory.end()
    return replace(
        result,
        seconds=time.monotonic() - begun_s,
        products=products.count,
        checked_bytes=memory.count,
        figures=(*products.figures(), *memory.figures()),
        errors=tuple(errors[:_MOST_ERRORS]),
        missing=memory.missing,
    )


class _Products:
    """Products of square matrices in the number formats of training, each compared with the first of its kind."""

    def __init__(self, number: int, device: str) -> None:
        import torch

        self._number, self._device = number, device
        self._on_gpu = device.startswith("cuda")
        self.count = 0
        self._times: dict[str, list[float]] = {}
        self._size = _GPU_SIZE if self._on_gpu else _CPU_SIZE
        while self._on_gpu and 24 * self._size**2 > torch.cuda.mem_get_info(device)[0] and self._size > 512:
            self._size //= 2
        half = torch.bfloat16 if not self._on_gpu or torch.cuda.is_bf16_supported() else torch.float16
        kinds = {
            "fp32": torch.float32,
            **({str(half)[6:].replace("bfloat", "bf"): half} if self._on_gpu else {}),
        }
        make = torch.Generator("cpu").manual_seed(7)
        shape = (self._size, self._size)
        one, other = (torch.randint(-_LARGEST, _LARGEST + 1, shape, generator=make) for _ in range(2))
        self._exact = one[:_ROWS] @ other
        self._kinds: dict[str, tuple[Any, Any, Any, Any]] = {}
        for name, kind in kinds.items():
            left, right = one.to(device, kind), other.to(device, kind)
            self._kinds[name] = left, right, torch.mm(left, right), torch.empty_like(left)
        self._is_compared = False

    def run(self, until_s: float) -> Iterator[str]:
        """Multiply until then; yields what is wrong with the results."""
        if not self._is_compared:
            self._is_compared = True
            for name, (left, _, first, _) in self._kinds.items():
                if not first[:_ROWS].cpu().equal(self._exact.to(left.dtype)):
                    yield f"the {name} product of whole numbers is not that of the host: the device computes wrongly"
        while True:
            for name, operands in self._kinds.items():
                wrong = self._several(name, *operands)
                if wrong:
                    yield f"{wrong} of {_AT_ONCE * self._size**2:,} results of equal {name} products differed"
            if time.monotonic() >= until_s:
                return

    def figures(self) -> Iterator[DeviceFigure]:
        """The speed in each format, of the median product."""
        for name, times in self._times.items():
            yield DeviceFigure(self._number, name, 2 * self._size**3 / max(median(times), 1e-9) * 1e-12)

    def _several(self, name: str, left: Any, right: Any, first: Any, into: Any) -> int:
        """How many results of some products are not those of the first one."""
        import torch

        clock = self._clock()
        wrong = torch.zeros((), dtype=torch.int64, device=self._device)
        spans: list[tuple[Any, Any]] = []
        for _ in range(_AT_ONCE):
            begin = clock()
            torch.mm(left, right, out=into)
            spans.append((begin, clock()))
            wrong += (into != first).sum()
        found = int(wrong.item())
        self.count += _AT_ONCE
        times = self._times.setdefault(name, [])
        times += [begin.elapsed_time(end) * 1e-3 if self._on_gpu else end - begin for begin, end in spans]
        del times[:-4096]
        return found

    def _clock(self) -> Any:
        import torch

        def event() -> Any:
            one = torch.cuda.Event(enable_timing=True)
            one.record(torch.cuda.current_stream(self._device))
            return one

        return event if self._on_gpu else time.perf_counter


class _Memory:
    """Free memory filled with numbers that differ from word to word, read back, then with their complements."""

    def __init__(self, number: int, device: str) -> None:
        import torch

        self._number, self._device = number, device
        self._on_gpu = device.startswith("cuda")
        self.count = 0
        self.missing: tuple[str, ...] = ()
        self._times: list[float] = []
        if self._on_gpu:
            wanted = int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
        else:
            wanted = min(int(available_bytes() * _CPU_SHARE), _MOST_CPU_BYTES)
        largest = _GPU_BLOCK_BYTES if self._on_gpu else _CPU_BLOCK_BYTES
        size = min(largest, max(wanted // 4, 1 << 16))
        self._words = size // 8
        self._pattern = torch.arange(self._words, dtype=torch.int64, device=device) * _STRIDE
        self._blocks: list[Any] = []
        try:
            for _ in range(max(wanted // size - 3, 1)):  # beside the pattern and what comparing takes
                self._blocks.append(torch.empty(self._words, dtype=torch.int64, device=device))
        except RuntimeError as error:  # others have taken memory meanwhile
            if not self._blocks:
                self.missing = (f"its memory was not tested: {str(error).splitlines()[0][:160]}",)
        self._turn = 0
        self._salts: list[int | None] = [None] * len(self._blocks)  # what each block was written with

    def run(self, until_s: float) -> Iterator[str]:
        """Write blocks until then, comparing what each has held since its turn before; yields what came back wrong."""
        import torch

        while self._blocks:
            place = self._turn % len(self._blocks)
            yield from self._compared(place)
            rounds = self._turn // len(self._blocks)
            salt = self._salts[place] = (rounds * 0x1234567) ^ (-1 if rounds % 2 else 0)
            torch.bitwise_xor(self._pattern, salt, out=self._blocks[place])
            self._turn += 1
            if time.monotonic() >= until_s:
                return

    def end(self) -> Iterator[str]:
        """Compare what all blocks hold."""
        for place in range(len(self._blocks)):
            yield from self._compared(place)

    def _compared(self, place: int) -> Iterator[str]:
        import torch

        block, salt = self._blocks[place], self._salts[place]
        if salt is None:
            return
        wrong = int((block.bitwise_xor_(salt) != self._pattern).sum().item())
        self._salts[place] = None
        self.count += self._words * 8
        if wrong:
            yield f"{wrong} of {self._words:,} words of its memory did not come back as they were written"
        begun_s = time.perf_counter()
        block.copy_(self._pattern)
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        self._times.append(time.perf_counter() - begun_s)
        del self._times[:-4096]

    def figures(self) -> Iterator[DeviceFigure]:
        """How fast its memory is copied: bytes read and written in a second."""
        if self._times:
            speed = 2 * 8 * self._words / max(median(self._times), 1e-9)
            yield DeviceFigure(self._number, "copy", speed * 1e-9, "GB/s")


def unusable(device: str) -> str:
    """Why torch cannot use the device, where that is no fault of it; "": it can, or the device is at fault."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if device.startswith("cuda") and torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return ""


def _end_with_parent() -> None:
    """Wait until stdin is closed, which is so once the process that holds its other end has gone."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def main(device: str, seconds: str) -> None:
    """Print the outcome as JSON. Ends early when stdin does."""
    name = f"GPU {device.partition(':')[2]}" if device.startswith("cuda") else "CPU"
    span_s = float(seconds)
    if not (math.isfinite(span_s) and 0 < span_s <= MOST_S):
        raise SystemExit(f"burn_in: {seconds}: give seconds, at most {MOST_S:g}")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if reason := unusable(device):
        result = Burnt(name, missing=(reason[:200],))
    else:
        try:
            result = burn_in(device, span_s)
        except Exception as error:
            lines = str(error).splitlines()
            text = f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
            # Torch tells of a device by RuntimeError. Memory that others hold, or an error of ours, is no fault of it.
            is_its_own = isinstance(error, RuntimeError) and type(error).__name__ != "OutOfMemoryError"
            result = Burnt(name, errors=(text,)) if is_its_own else Burnt(name, missing=(text,))
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a driver that hangs must not keep the process


if __name__ == "__main__":
    main(*sys.argv[1:3])
