"""The ring's writer and scans, compiled from ``native/``."""

from keepstep.core.compiled_part import not_loaded

try:
    from keepstep.ring._native import (  # pyright: ignore[reportMissingModuleSource]
        Operation,
        Reader,
        RingWriter,
        create,
    )
except ImportError as error:
    raise not_loaded(error) from error

__all__ = ["Operation", "Reader", "RingWriter", "create"]
