"""Messages between launcher, agent and controller: typed, framed, authenticated.

A node's side (agent or launcher), on its event loop::

    from keepstep import wire

    client = wire.connect(
        wire.parse_address("10.0.0.1:29400"),
        wire.read_secret(secret_file),           # refuses a file that others can read
        role="agent",                            # or "launcher"
        greet=lambda: [wire.Hello("agent", node, node_rank, os.getpid()), *groups_so_far, *findings_that_still_hold],
        message=on_message,                      # Welcome, ProfileRequest, StateRequest, SaveRings, Stop ...
        connected=lambda: ..., disconnected=lambda: ..., trouble=lambda error, attempt: ...,
        tls=wire.client_context(paths) if paths else None,
    )
    client.send(wire.Heartbeat(...))             # never blocks, never raises; queued (bounded) while unconnected
    await client.drained(1.0); await client.close()

``greet`` is called at every (re)connection and must say everything that a controller process that knows nothing needs:
Hello, then for a launcher Join (with ``node_rank`` as placed, once it is) and Ended when that has happened, for an
agent Groups and the findings that still hold. Delivery is at most once per connection; repeating is harmless.

Outside an event loop (a launcher that polls): :class:`BackgroundClient`, the same in a thread of its own.

The controller's side is ``serve``. ``wire.run(main())`` runs a coroutine on uvloop where it is installed.
"""

from keepstep.wire.address import parse_address
from keepstep.wire.background import BackgroundClient
from keepstep.wire.channel import TO_ELECTOR, ClientChannel, Ends, Role, ServerChannel, encode
from keepstep.wire.client import Client, ClientLimits, connect
from keepstep.wire.counters import Counters
from keepstep.wire.election import Answer, Ask, Leads, Where
from keepstep.wire.loops import loop_factory, run
from keepstep.wire.messages import (
    LEAST_HOLD_S,
    MOST_HOLD_S,
    MOST_SEATS,
    PROTOCOL,
    BackUp,
    Bye,
    Council,
    Ended,
    Failed,
    Found,
    Groups,
    Halt,
    Halted,
    Heartbeat,
    Held,
    HeldRank,
    Hello,
    Hold,
    Holder,
    Inventory,
    Join,
    Kept,
    Kill,
    Locate,
    Located,
    Measured,
    Message,
    Operate,
    Operated,
    PackedIterations,
    Placement,
    Probed,
    ProbeRequest,
    ProbeTarget,
    Profile,
    ProfileRequest,
    Pull,
    RankBeat,
    RankKeys,
    Reachable,
    Recovered,
    Refused,
    Release,
    Row,
    RunTests,
    SaveRings,
    Seal,
    Sealed,
    Seat,
    Shares,
    Spare,
    Splits,
    StateRequest,
    States,
    Stop,
    ToController,
    ToNode,
    Validate,
    Validated,
    Welcome,
)
from keepstep.wire.secret import read_secret, write_secret
from keepstep.wire.server import Connection, Server, ServerCallbacks, ServerLimits, serve
from keepstep.wire.tls import TlsPaths, client_context, server_context
from keepstep.wire.violation import REASONS, Reason, Unproven, Violation

__all__ = [
    "LEAST_HOLD_S",
    "MOST_HOLD_S",
    "MOST_SEATS",
    "PROTOCOL",
    "REASONS",
    "TO_ELECTOR",
    "Answer",
    "Ask",
    "BackUp",
    "BackgroundClient",
    "Bye",
    "Client",
    "ClientChannel",
    "ClientLimits",
    "Connection",
    "Council",
    "Counters",
    "Ended",
    "Ends",
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
    "Inventory",
    "Join",
    "Kept",
    "Kill",
    "Leads",
    "Locate",
    "Located",
    "Measured",
    "Message",
    "Operate",
    "Operated",
    "PackedIterations",
    "Placement",
    "ProbeRequest",
    "ProbeTarget",
    "Probed",
    "Profile",
    "ProfileRequest",
    "Pull",
    "RankBeat",
    "RankKeys",
    "Reachable",
    "Reason",
    "Recovered",
    "Refused",
    "Release",
    "Role",
    "Row",
    "RunTests",
    "SaveRings",
    "Seal",
    "Sealed",
    "Seat",
    "Server",
    "ServerCallbacks",
    "ServerChannel",
    "ServerLimits",
    "Shares",
    "Spare",
    "Splits",
    "StateRequest",
    "States",
    "Stop",
    "TlsPaths",
    "ToController",
    "ToNode",
    "Unproven",
    "Validate",
    "Validated",
    "Violation",
    "Welcome",
    "Where",
    "client_context",
    "connect",
    "encode",
    "loop_factory",
    "parse_address",
    "read_secret",
    "run",
    "serve",
    "server_context",
    "write_secret",
]
