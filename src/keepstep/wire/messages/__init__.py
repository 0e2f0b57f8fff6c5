"""The messages: tagged msgpack structs that both ends of a connection send after the handshake.

Each agent and launcher has one connection to the controller. No message carries raw events. Unknown fields
are ignored, so a newer minor version may add fields. The unions at the end of this file say who sends what;
a message's tag is the name of its class.
"""

# ruff: noqa: F403, F405
from __future__ import annotations

from keepstep.wire.messages.backups import *
from keepstep.wire.messages.limits import *
from keepstep.wire.messages.looking import *
from keepstep.wire.messages.membership import *
from keepstep.wire.messages.orders import *
from keepstep.wire.messages.watching import *

AgentMessage = (
    Hello
    | Groups
    | Heartbeat
    | Found
    | Profile
    | States
    | Reachable
    | Probed
    | Held
    | Measured
    | Splits
    | Inventory
    | Locate
    | Families
    | Checksums
    | Words
    | Bye
)
LauncherMessage = (
    Hello | Join | Found | Recovered | Failed | Halted | Sealed | Kept | Imports | Words | Ended | Bye
)
ClientMessage = Hello | Validate | Operate | Moved | Look | Bye
ViewerMessage = Hello | Look | Follow | Bye
ToController = AgentMessage | LauncherMessage | ClientMessage | ViewerMessage
ToViewer = Overview | Followed | Moved | Refused
ToNode = (
    Welcome
    | Placement
    | Council
    | Spare
    | Moved
    | Halt
    | Seal
    | Kill
    | ProfileRequest
    | StateRequest
    | ProbeRequest
    | Hold
    | RunTests
    | Release
    | Shares
    | BackUp
    | Located
    | Doubt
    | WhichFamilies
    | Validated
    | Operated
    | Overview
    | SaveRings
    | Imports
    | Stop
    | Renamed
    | Refused
)
