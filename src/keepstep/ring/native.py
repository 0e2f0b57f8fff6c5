"""The ring's writer and scans: the native ones, or those in plain Python where they are missing."""

_why = ""
try:
    from keepstep.ring._native import (  # pyright: ignore[reportMissingModuleSource]
        Operation,
        Reader,
        RingWriter,
        create,
    )
except ImportError as error:
    from keepstep.ring.python_format import create
    from keepstep.ring.python_reader import Reader  # type: ignore[assignment]
    from keepstep.ring.python_writer import Operation, RingWriter  # type: ignore[assignment]

    _why = str(error)

MISSING = _why
"""Why the native part cannot be loaded; empty: it can."""

__all__ = ["MISSING", "Operation", "Reader", "RingWriter", "create"]
