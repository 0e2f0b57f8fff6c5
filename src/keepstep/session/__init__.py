"""A training's few lines for going on within one step. Needs torch; see ``docs/howto/session.md``."""

from keepstep.session.session import Session, resilient
from keepstep.session.staying import Left

__all__ = ["Left", "Session", "resilient"]
