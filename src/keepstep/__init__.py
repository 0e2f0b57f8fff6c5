"""keepstep keeps every rank of a large distributed training job in step.

    @keepstep.resilient
    def train(session: keepstep.Session) -> None:
        model, optimizer, data = ...
        start = session.restore(model=model, optimizer=optimizer, data=data)
        for step in session.steps(start, total):
            ...
            optimizer.step()

This module loads nothing by itself: it is imported inside every worker (see ``keepstep._autoload``).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep import checkpoint
    from keepstep.core.errors import CheckpointError, KeepstepError
    from keepstep.session import Left, Session, resilient

__all__ = ["CheckpointError", "KeepstepError", "Left", "Session", "checkpoint", "resilient"]

__version__ = "0.1.0"

# Of all other names the home is session, which needs torch; launcher, agent and controller do not load torch.
_HOMES = {
    "CheckpointError": "keepstep.core.errors",
    "KeepstepError": "keepstep.core.errors",
    "checkpoint": "keepstep.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = import_module(_HOMES.get(name, "keepstep.session"))
    return home if name == "checkpoint" else getattr(home, name)
