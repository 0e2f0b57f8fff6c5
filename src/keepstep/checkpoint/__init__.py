"""Checkpoints in memory: a rank's state kept in its node's cache, outliving the rank.

    step = keepstep.checkpoint.load(state) or 0        # all ranks; None: nothing to go on from
    for step in range(step, steps):
        ...
        optimizer.step()
        keepstep.checkpoint.save(state, step + 1)      # all ranks, the same steps

``state`` is a dict of models, optimizers and other objects with ``state_dict``, tensors and plain values. Under
``keepstep run`` snapshots outlive the process; without it ``save`` keeps nothing and ``load`` finds nothing, so the
same script runs anywhere. See ``docs/howto/checkpoint.md`` and, for what is where, ``docs/design/checkpoint.md``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.checkpoint.api import RandomState, load, register, save, wait

__all__ = ["RandomState", "load", "register", "save", "wait"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from keepstep.checkpoint import api as door  # needs torch, which launcher and agent do not load

    return getattr(door, name)
