"""Checkpoints in memory: a rank's state is kept in its node's cache and outlives the rank's process.

    step = keepstep.checkpoint.load(state) or 0        # all ranks; None: nothing to go on from
    for step in range(step, steps):
        ...
        optimizer.step()
        keepstep.checkpoint.save(state, step + 1)      # all ranks, the same steps

``state`` is a dict of models, optimizers and other objects with ``state_dict``, tensors and plain values. Under
``keepstep run`` snapshots outlive the process; without it ``save`` keeps nothing and ``load`` finds nothing, so the
same script runs anywhere. ``docs/howto/checkpoint.md`` is the guide, ``docs/design/checkpoint.md`` describes the parts.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.checkpoint.api import RandomState, load, register, save, wait
    from keepstep.checkpoint.storage.dcp import DcpReader, DcpWriter
    from keepstep.core.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "DcpReader",
    "DcpWriter",
    "RandomState",
    "load",
    "register",
    "save",
    "wait",
]

# The modules of names that are not in api. All is imported late, because launcher and agent must not load torch.
_HOMES = {
    "CheckpointError": "keepstep.core.errors",
    "DcpReader": "keepstep.checkpoint.storage.dcp",
    "DcpWriter": "keepstep.checkpoint.storage.dcp",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES.get(name, "keepstep.checkpoint.api")), name)
