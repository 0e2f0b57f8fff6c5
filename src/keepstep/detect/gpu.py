"""Whether a GPU is slower than it could be, and why: its clock and what its driver says of it (as NVML tells)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_REASONS = {  # NVML's bits, the graver first
    0x08: "hardware slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x20: "thermal slowdown",
    0x400: "reliability limit",
    0x04: "power cap",
    0x100: "display clock setting",
    0x02: "application clock setting",
}
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One look at a GPU. Clocks in MHz."""

    time_s: float
    clock: int
    most: int  # that it can have
    reasons: int  # NVML's bits
    celsius: int


@dataclass(frozen=True, slots=True)
class LowClock:
    """A GPU whose clock is held down. ``share``: of what it could compute in the time."""

    cause: str
    share: float
    detail: str


def low_clock(samples: Sequence[GpuSample], *, least_share: float = 0.05) -> LowClock | None:
    """Of the looks at which something held the clock down; None: nothing does, or less than ``least_share`` is lost.

    A GPU that is idle has a low clock too, and no reason but that.
    """
    known = [one for one in samples if one.most > 0]
    held = [one for one in known if _held(one)]
    if len(held) < _FEWEST or 2 * len(held) < len(known):
        return None
    share = 1 - sum(one.clock / one.most for one in held) / len(held)
    if share < least_share:
        return None
    bits = 0
    for one in held:
        bits |= one.reasons
    why = [text for bit, text in _REASONS.items() if bits & bit]
    last = held[-1]
    return LowClock("GPU clock", share, f"{last.clock} of {last.most} MHz: {', '.join(why)}, {last.celsius} °C")


def _held(one: GpuSample) -> bool:
    return one.clock < one.most and any(one.reasons & bit for bit in _REASONS)
