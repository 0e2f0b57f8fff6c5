"""The rows that a ring's reader gives, as numpy types."""

from __future__ import annotations

import numpy as np

_RECORD_FIELDS = {
    "ticket": ("u8", 0),
    "start_ns": ("i8", 8),
    "end_ns": ("i8", 16),
    "wait_ns": ("i8", 24),
    "bytes": ("u8", 32),
    "seq": ("u4", 40),
    "peer": ("i4", 44),
    "thread": ("u4", 48),
    "site": ("u4", 52),
    "group": ("i2", 56),
    "kind": ("u1", 58),
    "op": ("u1", 59),
    "flags": ("u2", 60),
}
_STREAM_FIELDS = {
    "started": ("u8", 0),
    "completed": ("u8", 8),
    "last_start_ns": ("i8", 16),
    "last_end_ns": ("i8", 24),
    "peer": ("i4", 32),
    "group": ("i2", 36),
    "kind": ("u1", 38),
    "op": ("u1", 39),
}


def _dtype(fields: dict[str, tuple[str, int]], row_bytes: int) -> np.dtype[np.void]:
    return np.dtype(
        {
            "names": list(fields),
            "formats": [kind for kind, _ in fields.values()],
            "offsets": [offset for _, offset in fields.values()],
            "itemsize": row_bytes,
        }
    )


RECORD = _dtype(_RECORD_FIELDS, 64)
"""One operation or phase. ``end_ns`` 0: in flight; ``wait_ns`` 0: no wait seen; times on the node's CLOCK_MONOTONIC."""

STREAM = _dtype(_STREAM_FIELDS, 40)
"""One (group, peer, direction): operations started (= last ``seq``) and completed; ``op`` of the last one started."""
