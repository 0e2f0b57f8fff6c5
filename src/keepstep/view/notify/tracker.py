"""What an experiment tracker is asked to do, and how the process that asks it is spoken to."""

from __future__ import annotations

from typing import Protocol

import msgspec

from keepstep.view.notify.notice import Notice
from keepstep.view.notify.pace_series import PacePoint


class Tracker(Protocol):
    """A tracker in the process of its own. All calls may raise anything and may hang."""

    def pace(self, point: PacePoint) -> None:
        """Add a point to the series."""
        ...

    def notice(self, notice: Notice) -> None:
        """Record an event."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TrackerOptions(msgspec.Struct, frozen=True):
    """How a tracker is set up. It is sent over a pipe, as some of it is secret."""

    kind: str  # wandb, tensorboard, mlflow or otel
    run: str  # the run's name
    project: str = ""
    entity: str = ""
    run_id: str = ""  # the job's own run in the tracker
    mode: str = ""
    folder: str = ""  # where files are written
    uri: str = ""
    headers: dict[str, str] = {}


class TrackerOrder(msgspec.Struct, omit_defaults=True):
    """One thing to record."""

    point: PacePoint | None = None
    notice: Notice | None = None
