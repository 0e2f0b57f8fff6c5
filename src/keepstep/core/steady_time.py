"""Unix time that goes on evenly where the machine's clock is set: by NTP after a boot, by hand, after a suspension."""

from __future__ import annotations

import time

_OFFSET_S = time.time() - time.monotonic()


def steady_unix_s(monotonic_s: float) -> float:
    """A moment on CLOCK_MONOTONIC in Unix seconds, by the clock as it was set when this process began."""
    return monotonic_s + _OFFSET_S


def monotonic_s(unix_s: float) -> float:
    """A moment on CLOCK_MONOTONIC, from its Unix time by the clock as it is set now."""
    return time.monotonic() - (time.time() - unix_s)
