"""The copy engine and its checksums, compiled from ``native/``."""

from keepstep.core.compiled_part import not_loaded

try:
    from keepstep.checkpoint._native import (  # pyright: ignore[reportMissingModuleSource]
        DATA_OFFSET,
        MAGIC,
        ON_DEVICE,
        URGENT,
        Snapshot,
        checksum,
        checksums,
        clear,
        combine,
        copy_out,
        has_cuda,
        populate,
        slot_bytes,
    )
except ImportError as error:
    raise not_loaded(error) from error

__all__ = [
    "DATA_OFFSET",
    "MAGIC",
    "ON_DEVICE",
    "URGENT",
    "Snapshot",
    "checksum",
    "checksums",
    "clear",
    "combine",
    "copy_out",
    "has_cuda",
    "populate",
    "slot_bytes",
]
