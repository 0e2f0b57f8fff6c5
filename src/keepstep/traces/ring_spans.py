"""What a rank's ring holds as bars, whether the job lives or the ring was saved."""

from __future__ import annotations

import time
from pathlib import Path

from keepstep.ring import RingReader
from keepstep.traces.chrome import Span, spans_of


def read_spans(path: Path) -> list[Span]:
    """The bars of a ring, in Unix microseconds. Raises RingError."""
    reader = RingReader(str(path))
    header, records = reader.header, reader.snapshot()
    last_ns = int(max(records["start_ns"].max(), records["end_ns"].max())) if len(records) else 0
    now_ns = time.monotonic_ns() if path.is_relative_to("/proc") else last_ns
    shift_ns = header.realtime_ns - header.monotonic_ns
    return list(spans_of(records, reader.groups(), shift_ns=shift_ns, now_ns=now_ns))
