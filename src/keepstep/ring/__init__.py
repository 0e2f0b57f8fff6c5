"""The event ring of one rank: written by the training process, read by anybody, also after its death.

``create`` makes one in a memfd, ``RingWriter`` writes it, ``RingReader`` reads it live (by descriptor or
``/proc/PID/fd/N``) or from a saved file. See ``docs/design/ring.md``.
"""

from keepstep.ring._native import (  # pyright: ignore[reportMissingModuleSource]
    Operation,
    RingWriter,
    create,
)
from keepstep.ring.reader import RECORD, STREAM, Batch, RingHeader, RingReader

__all__ = ["RECORD", "STREAM", "Batch", "Operation", "RingHeader", "RingReader", "RingWriter", "create"]
