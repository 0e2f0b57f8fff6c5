"""The parts of the probe that run in the middle of a training step, compiled from ``native/capture.cpp``."""

from keepstep.core.compiled_part import not_loaded

try:
    from keepstep.capture._native import (  # pyright: ignore[reportMissingModuleSource]
        Buckets,
        Here,
        Hidden,
        Oldest,
    )
except ImportError as error:
    raise not_loaded(error) from error

__all__ = ["Buckets", "Here", "Hidden", "Oldest"]
