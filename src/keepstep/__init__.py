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
    from keepstep.session import Session, resilient

__all__ = ["Session", "resilient"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from keepstep import session  # needs torch

    return getattr(session, name)
