"""What the core of the controller wants done by its server.

All parts of the core add to one list of effects (``effects``), which the controller hands out after each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from keepstep.core.incident import Incident
from keepstep.wire.messages import Council, Message, Placement, Seat, Standing, Stop


@dataclass(frozen=True, slots=True)
class Send:
    """Send one message to some peers, which are numbers of connections."""

    peers: tuple[int, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close a peer's connection once the messages to it have been sent."""

    peer: int
    reason: str


@dataclass(frozen=True, slots=True)
class WriteIncident:
    """Write or rewrite ``RUN/incidents/NNNN.json`` and its text."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class Say:
    """Print a verdict, a ``sharper`` one, the newest action (``acts``), or the line that ``closes`` an incident."""

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
    """Keep how the job ends, so that the next controller process ends it in the same way."""

    stop: Stop


@dataclass(frozen=True, slots=True)
class StoreStanding:
    """Keep an operator's standing orders for the next controller process of this run."""

    standing: Standing


@dataclass(frozen=True, slots=True)
class StoreCouncil:
    """Keep the council for the next controller process on this host. It is carried out before anybody is told."""

    council: Council


@dataclass(frozen=True, slots=True)
class Reach:
    """Try to reach the election port of a launcher, until that succeeds or the peer is gone."""

    peer: int
    seat: Seat


@dataclass(frozen=True, slots=True)
class Exit:
    """The job is over: end the controller."""

    exit_code: int
    reason: str


Effect = (
    Send
    | Disconnect
    | WriteIncident
    | Say
    | Tell
    | StorePlacement
    | StoreStop
    | StoreStanding
    | StoreCouncil
    | Reach
    | Exit
)
