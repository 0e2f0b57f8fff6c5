"""A real GPU for the jobs of the stand-in: kernels that last as long as they are told to, and the device's own clock.

Ranks share one GPU where there are fewer GPUs than ranks. What its streams wait for is a kernel that spins on one
multiprocessor, so ranks that share the GPU by MPS do not take each other's time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

SHARED_FROM = (2, 30)  # NCCL that lets ranks of one host share a GPU
FOR_GOOD_CYCLES = 1 << 62
_TRIED_CYCLES = 20_000_000


def take_device(local_rank: int, ranks: int) -> torch.device:
    """The GPU of this rank; where all have to share one, NCCL is told so."""
    count = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    if ranks > count:
        share_device()
    return device


def share_device() -> None:
    """Let the ranks of this host use one GPU."""
    from torch.cuda import nccl

    if nccl.version() >= SHARED_FROM:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:  # it refuses a second rank of the same host
        os.environ["NCCL_HOSTID"] = f"host-of-rank-{os.environ['RANK']}"


class RealDevice:
    """Plays on a GPU what ``benchmarks.stand_in.device.Device`` plays on the stand-in, as far as one GPU can."""

    def __init__(self, layer_us: float) -> None:
        """``layer_us``: of a pass of each layer; 0: what it takes by itself."""
        self._factor = 1.0
        self._next: str = ""
        self._marks: dict[int, torch.cuda.Event] = {}
        self._cycles = layer_us * self._cycles_of_1_us() if layer_us else 0.0

    def load(self, layers: Iterable[nn.Module]) -> None:
        """Let the forward and the backward pass of each layer take the time that was set."""
        for layer in layers:
            layer.register_forward_hook(lambda *_: self._spin())
            layer.register_full_backward_hook(lambda *_: self._spin())

    def slow_down(self, factor: float) -> None:
        """Let the layers take ``factor`` times as long."""
        self._factor = factor

    def hang_next(self) -> None:
        """Let the next layer's kernel never end."""
        self._next = "hang"

    def fail_next(self, error: int) -> None:
        """Let the next layer's kernel read outside of its memory, whatever ``error`` says."""
        self._next = "fail"

    def host_works(self, seconds: float) -> None:
        time.sleep(seconds)

    def mark(self, stream: int, tag: int) -> None:
        """Take the device's time when the current stream, which ``stream`` is, gets here."""
        self._marks[tag] = torch.cuda.Event(enable_timing=True)
        self._marks[tag].record()

    def cut(self, stream: int, source: int, target: int, on: bool = True) -> None:
        raise ValueError("ranks of one host have no link that can be cut")

    def fail_links(self, stream: int, rank: int) -> None:
        raise ValueError("links of a real device do not fail by an order")

    def slow_pair(self, stream: int, source: int, target: int, percent: int) -> None:
        raise ValueError("ranks of one host have no link that can be throttled")

    def counts(self) -> Mapping[str, int]:
        """A GPU does not count its calls."""
        return {}

    def write_marks(self, path: Path) -> None:
        """The times in ns after the first mark, as the stand-in writes its log. Waits for the device."""
        torch.cuda.synchronize()
        marks = iter(self._marks.items())
        tag, first = next(marks)
        lines = [f"mark {tag} 0"]
        lines += [f"mark {tag} {round(first.elapsed_time(event) * 1e6)}" for tag, event in marks]
        path.write_text("\n".join(lines) + "\n")

    def _spin(self) -> None:
        told, self._next = self._next, ""
        if told == "fail":
            torch.zeros(4, device="cuda")[torch.tensor([100], device="cuda")]
        torch.cuda._sleep(FOR_GOOD_CYCLES if told == "hang" else int(self._cycles * self._factor))

    @staticmethod
    def _cycles_of_1_us() -> float:
        """At the clock that the GPU has after a moment of work; the shortest of several times, for it may be shared."""
        took: list[float] = []
        for _ in range(5):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            torch.cuda._sleep(_TRIED_CYCLES)
            ended.record()
            torch.cuda.synchronize()
            took.append(begun.elapsed_time(ended))
        return _TRIED_CYCLES / (min(took) * 1e3)
