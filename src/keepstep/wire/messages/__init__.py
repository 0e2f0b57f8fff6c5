"""The messages: tagged msgpack structs that both ends of a connection send after the handshake.

Each agent and launcher has one connection to the controller. No message carries raw events. Unknown fields
are ignored, so a newer minor version may add fields. The unions at the end of this file say who sends what;
a message's tag is the name of its class.
"""

from __future__ import annotations

from keepstep.wire.messages.backups import BackUp, Holder, Inventory, Locate, Located, Pull, RankKeys
from keepstep.wire.messages.limits import (
    LEAST_HOLD_S,
    MOST_HELD_KEYS,
    MOST_HELD_RANKS,
    MOST_HOLD_S,
    MOST_LABEL,
    MOST_LOAD_BYTES,
    MOST_NODE_ENDPOINTS,
    MOST_REPLICAS,
    MOST_SEATS,
    PROTOCOL,
    Host,
    Message,
    Port,
    Term,
    Token,
)
from keepstep.wire.messages.membership import (
    Bye,
    Council,
    Ended,
    Failed,
    Halt,
    Halted,
    Hello,
    Join,
    Kept,
    Kill,
    Operate,
    Operated,
    Placement,
    Recovered,
    Refused,
    Row,
    Seal,
    Sealed,
    Seat,
    Spare,
    Stop,
    Welcome,
)
from keepstep.wire.messages.shares import Shares, Splits
from keepstep.wire.messages.validation import (
    Held,
    HeldRank,
    Hold,
    Measured,
    Release,
    RunTests,
    Validate,
    Validated,
)
from keepstep.wire.messages.watching import (
    Found,
    Groups,
    Heartbeat,
    PackedIterations,
    Probed,
    ProbeRequest,
    ProbeTarget,
    Profile,
    ProfileRequest,
    RankBeat,
    Reachable,
    SaveRings,
    StateRequest,
    States,
)

__all__ = [
    "LEAST_HOLD_S",
    "MOST_HELD_KEYS",
    "MOST_HELD_RANKS",
    "MOST_HOLD_S",
    "MOST_LABEL",
    "MOST_LOAD_BYTES",
    "MOST_NODE_ENDPOINTS",
    "MOST_REPLICAS",
    "MOST_SEATS",
    "PROTOCOL",
    "AgentMessage",
    "BackUp",
    "Bye",
    "ClientMessage",
    "Council",
    "Ended",
    "Failed",
    "Found",
    "Groups",
    "Halt",
    "Halted",
    "Heartbeat",
    "Held",
    "HeldRank",
    "Hello",
    "Hold",
    "Holder",
    "Host",
    "Inventory",
    "Join",
    "Kept",
    "Kill",
    "LauncherMessage",
    "Locate",
    "Located",
    "Measured",
    "Message",
    "Operate",
    "Operated",
    "PackedIterations",
    "Placement",
    "Port",
    "ProbeRequest",
    "ProbeTarget",
    "Probed",
    "Profile",
    "ProfileRequest",
    "Pull",
    "RankBeat",
    "RankKeys",
    "Reachable",
    "Recovered",
    "Refused",
    "Release",
    "Row",
    "RunTests",
    "SaveRings",
    "Seal",
    "Sealed",
    "Seat",
    "Shares",
    "Spare",
    "Splits",
    "StateRequest",
    "States",
    "Stop",
    "Term",
    "ToController",
    "ToNode",
    "Token",
    "Validate",
    "Validated",
    "Welcome",
]

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
    | Bye
)
LauncherMessage = Hello | Join | Found | Recovered | Failed | Halted | Sealed | Kept | Ended | Bye
ClientMessage = Hello | Validate | Operate | Bye
ToController = AgentMessage | LauncherMessage | ClientMessage
ToNode = (
    Welcome
    | Placement
    | Council
    | Spare
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
    | Validated
    | Operated
    | SaveRings
    | Stop
    | Refused
)
