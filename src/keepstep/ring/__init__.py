"""The event ring of one rank: written by the training process, read by anybody, also after its death.

``create`` makes one in a memfd, ``RingWriter`` writes it, ``RingReader`` reads it live (by descriptor or
``/proc/PID/fd/N``) or from a saved file. See ``docs/design/ring.md``. The reading side needs numpy and is loaded when
first asked for, as launchers and workers only make and write rings.
"""

from typing import TYPE_CHECKING, Any

from keepstep.ring.native import Operation, RingWriter, create

if TYPE_CHECKING:
    from keepstep.ring.reader import RECORD, RETIRED, STREAM, Batch, RingHeader, RingReader

__all__ = [
    "RECORD",
    "RETIRED",
    "STREAM",
    "Batch",
    "Operation",
    "RingHeader",
    "RingReader",
    "RingWriter",
    "create",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from keepstep.ring import reader

    return getattr(reader, name)
