"""Whether a GPU is slower than it was, and why: its clock and what its driver says of it (as NVML tells)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

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
_ANY = sum(_REASONS)
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One look at a GPU. ``clock``: of its multiprocessors, in MHz. ``reasons``: NVML's bits. ``busy``: it computes."""

    time_s: float
    clock: int
    reasons: int
    celsius: int
    busy: bool


@dataclass(frozen=True, slots=True)
class LowClock:
    """A GPU whose clock is held down. ``share``: of what it could compute in the time, lost by it."""

    share: float
    detail: str


def usual_clock(samples: Sequence[GpuSample]) -> float:
    """MHz while the GPU computed; 0 when it never did."""
    return median([one.clock for one in samples if one.busy] or [0])


def low_clock(
    samples: Sequence[GpuSample], usual_mhz: float, *, least_share: float = 0.05
) -> LowClock | None:
    """Whether the driver held the clock down in most looks; None: no, or less than ``least_share`` is lost by it.

    ``usual_mhz``: what this GPU had before, or its neighbours have. Not what it could have at most: a GPU that works
    hard is at its power cap, and no slower for it than it always was.
    """
    busy = [one for one in samples if one.busy]
    held = [one for one in busy if one.clock < usual_mhz and one.reasons & _ANY]
    if len(held) < _FEWEST or 2 * len(held) < len(busy):
        return None
    share = 1 - fmean(one.clock for one in held) / usual_mhz
    if share < least_share:
        return None
    last = held[-1]
    why = ", ".join(text for bit, text in _REASONS.items() if any(one.reasons & bit for one in held))
    return LowClock(share, f"{last.clock} MHz, usually {usual_mhz:.0f}: {why}, {last.celsius} °C")
