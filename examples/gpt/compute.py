"""What a layer's computation costs: nothing extra, an emulated accelerator, or an injected slowness.

A block marks where its forward and backward begin and end. With ``--emulate-compute-ms`` the time between
the two marks is stretched by sleeping to what an accelerator would have taken; without it, nothing is added
unless a fault asks for it. Sleeping leaves the CPU to others: a few ranks on two cores keep a steady pace.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor


class Faults(Protocol):
    """What ``keepstep.faults`` gives us; see ``--fault``."""

    def begin_step(self, step: int) -> None: ...
    def at(self, phase: str) -> None: ...
    def fetch(self) -> None: ...
    def skips(self) -> bool: ...
    def compute_factor(self) -> float: ...


class NoFaults:
    """The usual case: nothing is injected."""

    def begin_step(self, step: int) -> None: ...
    def at(self, phase: str) -> None: ...
    def fetch(self) -> None: ...

    def skips(self) -> bool:
        return False

    def compute_factor(self) -> float:
        return 1.0


class Compute:
    """The cost of a layer's forward and backward on this rank."""

    def __init__(self, emulate_s: float, faults: Faults, *, overlap_host: bool, device: torch.device) -> None:
        """``emulate_s``: seconds of an emulated forward; backward takes twice that. 0: real compute.

        ``overlap_host``: the CPU's own work counts as part of the emulated time: a GPU's queue hides it, too.
        Wrong where a layer waits for peers inside (tensor parallelism): the wait would be hidden too.
        """
        self.emulate_s, self.faults, self.overlap_host, self.device = emulate_s, faults, overlap_host, device
        self._overshoot_s = _sleep_overshoot_s() if emulate_s else 0.0

    def begin(self, phase: str) -> float:
        self.faults.at(phase)
        factor = self.faults.compute_factor()
        if self.emulate_s and not self.overlap_host:
            self._sleep(self._emulated_s(phase) * factor)
        elif factor != 1.0 and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def end(self, phase: str, began: float) -> None:
        factor = self.faults.compute_factor()
        if self.emulate_s:
            if self.overlap_host:
                self._sleep(self._emulated_s(phase) * factor - (time.perf_counter() - began))
        elif factor > 1.0:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            time.sleep((factor - 1.0) * (time.perf_counter() - began))

    def _emulated_s(self, phase: str) -> float:
        return self.emulate_s * (2.0 if phase == "backward" else 1.0)

    def _sleep(self, seconds: float) -> None:
        if seconds > self._overshoot_s:
            time.sleep(seconds - self._overshoot_s)


def _sleep_overshoot_s() -> float:
    """By how much a sleep is usually too long on this machine."""
    late: list[float] = []
    for _ in range(15):
        began = time.perf_counter()
        time.sleep(0.001)
        late.append(time.perf_counter() - began - 0.001)
    return max(0.0, sorted(late)[len(late) // 2])


class Span:
    """One block's pass: both marks share it, so that backward's end knows backward's begin."""

    __slots__ = ("began", "compute")

    def __init__(self, compute: Compute) -> None:
        self.compute, self.began = compute, 0.0


class Enter(torch.autograd.Function):
    """Identity at a block's input: forward begins here, backward ends here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, span: Span) -> Tensor:
        ctx.span = span
        span.began = span.compute.begin("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.span.compute.end("backward", ctx.span.began)
        return grads[0], None


class Leave(torch.autograd.Function):
    """Identity at a block's output: forward ends here, backward begins here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, span: Span) -> Tensor:
        ctx.span = span
        span.compute.end("forward", span.began)
        return x.clone()  # FSDP2 wants no view here

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.span.began = ctx.span.compute.begin("backward")
        return grads[0], None
