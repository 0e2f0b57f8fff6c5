"""Has the kernel told of broken hardware? Where its log may be read; elsewhere nothing is found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from keepstep.launch.checks import Found, Subject

_PATH = "/dev/kmsg"
_MOST = 20_000  # lines
_BROKEN = re.compile(
    r"NVRM: Xid.*?: (48|62|63|64|74|79|92|94|95|119|120)\b"  # memory, NVLink, off the bus, firmware
    r"|\[Hardware Error\]|Machine check events|mce: .*Uncorrected|EDAC .*\bUE\b"
    r"|(I/O|critical medium) error, dev (?!sr|fd|loop)\w+|nvme\w*: (controller is down|I/O \d+.*timeout)"
    r"|mlx5_core.*(health compromised|fatal)|Remounting filesystem read-only"
)


def look(subject: Subject, path: str = _PATH) -> Iterator[Found]:
    """The newest error since ``subject.since_s``, and how many there were; only a hint where nothing has failed yet."""
    errors = [text for text in _lines(path, subject.since_s) if _BROKEN.search(text)]
    if errors:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        told = f"the kernel tells of broken hardware: {errors[-1][:160]}{more}"
        yield Found(
            f"node {subject.node}: {told}; drain the node and have it looked at", unfit=not subject.fresh
        )


def _lines(path: str, since_s: float) -> Iterator[str]:
    """What came into the log since then. Older records cost next to nothing: a recovery is under way beside us."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        for _ in range(_MOST):
            try:
                record = os.read(log, 8192)
            except BrokenPipeError:  # overwritten while we read: the next read goes on after it
                continue
            except OSError:
                return
            if not record:
                return
            # priority, sequence number, microseconds and flags; the text; on further lines its details
            head, _, text = record.partition(b";")
            fields = head.split(b",", 3)
            if len(fields) >= 3 and fields[2].isdigit() and int(fields[2]) >= since_s * 1e6:
                yield text.partition(b"\n")[0].decode(errors="replace")
    finally:
        os.close(log)
