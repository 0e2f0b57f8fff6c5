"""Asks the controller of a living run how it stands, again and again, as a viewer that only looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepstep.core.incident import Incident
from keepstep.core.layout import ParallelLayout
from keepstep.traces import Run
from keepstep.view.snapshot import LinkRate, RankTable


@dataclass(frozen=True, slots=True)
class LiveView:
    """What a controller has answered.

    Attributes:
        status: what `Run.status` gives, but with no rows in the ``ranks`` of its nodes. Each node has ``sealed_step``,
            ``backed_up_step``, ``stored_step`` (-1: none) and ``storage_troubles`` as well.
        ranks: the newest heartbeat of every rank.
        links: what nodes lately sent each other; those of the last ten seconds stay until newer ones are told.
        incidents: those that are new or have changed since the last answer, by number. The first answer has the last 64.
        layout: the declared or inferred layout; None while it is not known.
        started_unix_s: when the run was started; 0: not known.
    """

    status: dict[str, Any]
    ranks: RankTable
    links: tuple[LinkRate, ...]
    incidents: list[Incident]
    layout: ParallelLayout | None
    started_unix_s: float


class Follower:
    """A connection to the controller of one run, which is made again when it broke, also where the controller moved.

    Blocks, for at most ``patience_s`` a call. Not for several threads at once.
    """

    def __init__(self, run: Run, patience_s: float = 10.0) -> None: ...

    def ask(self) -> LiveView:
        """How the run stands now.

        Raises RunError where it is not watched or has ended, or its controller refuses or does not answer.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection."""
