"""The ring's writer and scans, compiled from ``native/``; ``_native.pyi`` lists what is in it."""

from keepstep.core.compiled_part import not_loaded

try:
    from keepstep.ring._native import *  # noqa: F403  # pyright: ignore[reportMissingModuleSource]
except ImportError as error:
    raise not_loaded(error) from error
