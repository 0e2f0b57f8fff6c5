"""What is done with every record of a rank, compiled from ``native/``; ``_native.pyi`` lists what is in it."""

from keepstep.core.compiled_part import not_loaded

try:
    from keepstep.agent.ranks._native import *  # noqa: F403  # pyright: ignore[reportMissingModuleSource]
except ImportError as error:
    raise not_loaded(error) from error
