"""What the controller's core wants done by its rim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keepstep.core.incident import Incident
from keepstep.wire.messages import Council, Message, Placement, Seat, Stop


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message to some peers (numbers of connections)."""

    peers: tuple[int, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close a peer's connection once what was sent to it has left."""

    peer: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriteIncident:
    """Write or rewrite ``RUN/incidents/NNNN.json`` and its text."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class Say:
    """Print: a ``verdict``, one that is ``sharper`` than the last, the newest action, the line that ``closes`` it."""

    incident: Incident
    what: Literal["verdict", "sharper", "acts", "closes"]


@dataclass(frozen=True, slots=True)
class Tell:
    """Print a line for the operator."""

    text: str


@dataclass(frozen=True, slots=True)
class StorePlacement:
    """Keep the rank table for the next controller process of this run."""

    placements: tuple[tuple[str, int, Placement], ...]  # node name, launcher's process, placement


@dataclass(frozen=True, slots=True)
class StoreStop:
    """Keep what the job ends with, so that the next controller process ends it, too."""

    stop: Stop


@dataclass(frozen=True, slots=True)
class StoreCouncil:
    """Keep the council for the next controller process of this host, before it is told to anybody."""

    council: Council


@dataclass(frozen=True, slots=True)
class Reach:
    """Find out whether a launcher's election port can be reached, for as long as the peer is there."""

    peer: int
    seat: Seat


@dataclass(frozen=True, slots=True)
class Exit:
    """The job is over: end the controller."""

    exit_code: int
    reason: str


Effect = (
    Send | Disconnect | WriteIncident | Say | Tell | StorePlacement | StoreStop | StoreCouncil | Reach | Exit
)
