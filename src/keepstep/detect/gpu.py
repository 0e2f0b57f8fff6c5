"""Whether a GPU is slower than it was, and why: its clock and its driver's reasons, as NVML reports them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

_REASONS = {  # bits that NVML sets when it holds the clock down, the graver first
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
_FEWEST = 3  # looks with a low clock that are proof
_LEAST_SHARE = 0.05  # part of what the GPU could compute; a smaller loss is none


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One look at a GPU.

    ``clock``: that of its multiprocessors, in MHz. ``reasons``: NVML's bits. ``busy``: the GPU is computing.
    """

    time_s: float
    clock: int
    reasons: int
    celsius: int
    busy: bool


@dataclass(frozen=True, slots=True)
class LowClock:
    """A GPU whose clock is held down. ``share``: the part of what it could compute that is lost by it."""

    share: float
    detail: str


def usual_clock(samples: Sequence[GpuSample]) -> float:
    """The median clock in MHz while the GPU was computing; 0 when it never was."""
    return median([one.clock for one in samples if one.busy] or [0])


def low_clock(samples: Sequence[GpuSample], usual_mhz: float) -> LowClock | None:
    """What the GPU loses if the driver held the clock down in most looks; None: it did not, or hardly.

    ``usual_mhz``: the clock that this GPU had before, or that its neighbours have. Not the highest possible one: a GPU
    that works hard is at its power cap, and no slower for it than it always was.
    """
    busy = [one for one in samples if one.busy]
    held = [one for one in busy if one.clock < usual_mhz and one.reasons & _ANY]
    if len(held) < _FEWEST or 2 * len(held) < len(busy):
        return None
    share = 1 - fmean(one.clock for one in held) / usual_mhz
    if share < _LEAST_SHARE:
        return None
    last = held[-1]
    why = ", ".join(text for bit, text in _REASONS.items() if any(one.reasons & bit for one in held))
    return LowClock(share, f"{last.clock} MHz, usually {usual_mhz:.0f}: {why}, {last.celsius} °C")
