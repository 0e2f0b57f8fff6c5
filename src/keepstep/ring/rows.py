"""The rows that a ring's reader gives, as numpy types."""

from __future__ import annotations

import numpy as np

RECORD = np.dtype([
    ("ticket", "u8"), ("start_ns", "i8"), ("end_ns", "i8"), ("wait_ns", "i8"), ("bytes", "u8"),
    ("seq", "u4"), ("peer", "i4"), ("thread", "u4"), ("site", "u4"),
    ("group", "i2"), ("kind", "u1"), ("op", "u1"), ("flags", "u2"),
], align=True)  # fmt: skip
"""One operation or phase. ``end_ns`` 0: in flight; ``wait_ns`` 0: no wait seen; times on the node's CLOCK_MONOTONIC."""

STREAM = np.dtype([
    ("started", "u8"), ("completed", "u8"), ("last_start_ns", "i8"), ("last_end_ns", "i8"),
    ("peer", "i4"), ("group", "i2"), ("kind", "u1"), ("op", "u1"),
], align=True)  # fmt: skip
"""One (group, peer, direction): operations started (= last ``seq``) and completed; ``op`` of the last one started."""
