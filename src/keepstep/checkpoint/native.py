"""The copy engine: the native one, or the one in plain Python where that is missing (``keepstep.ring.native``)."""

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
except ImportError:
    from tests.twins.checkpoint.python_native import (  # type: ignore[assignment]
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
