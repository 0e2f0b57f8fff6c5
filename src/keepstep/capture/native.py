"""What runs in the middle of a training step: native, or in plain Python where that is missing."""

try:
    from keepstep.capture._native import (  # pyright: ignore[reportMissingModuleSource]
        Buckets,
        Here,
        Hidden,
        Oldest,
    )
except ImportError:
    from keepstep.capture.python_native import Buckets, Here, Hidden, Oldest  # type: ignore[assignment]

__all__ = ["Buckets", "Here", "Hidden", "Oldest"]
