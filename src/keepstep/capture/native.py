"""The parts of the probe that run in the middle of a training step; ``_native.pyi`` lists what is in it."""

from keepstep.core.compiled_part import not_loaded

try:
    from keepstep.capture._native import *  # noqa: F403  # pyright: ignore[reportMissingModuleSource]
except ImportError as error:
    raise not_loaded(error) from error
