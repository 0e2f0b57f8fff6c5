"""The base class of all messages, the protocol version, and upper bounds on what a message may hold."""

from __future__ import annotations

from typing import Annotated

import msgspec

from keepstep.core.summary import Endpoint

PROTOCOL = 4
MOST_HELD_KEYS = 8  # most snapshots of one rank that one node holds
MOST_HELD_RANKS = 4096  # most ranks whose snapshots one node holds
MOST_NODE_ENDPOINTS = 4
MOST_FAMILIES = 1 << 16  # most parameters of a rank whose checksums are compared
MOST_KEPT = 16  # most tensors that belong to one of them, with itself
LEAST_HOLD_S, MOST_HOLD_S = 5.0, 20.0  # bounds on how long a validation may hold the job
MOST_NOTICES = 16  # most that one node's operator is told at once
MOST_PATHS = 64  # most network paths of a node that a heartbeat tells of
MOST_SAID = 64  # most lines that one message with words holds
MOST_LABEL = 100  # most characters in a failure domain's name
MOST_SEATS = 7  # most launchers in a council
MOST_TABLE = 1 << 16  # most rows of a rank table, one per node
MOST_REPLICAS = 1 << 14  # most replicas of one model
MOST_MODULES = 1 << 14  # most that a standby imports
MOST_LOAD_BYTES = 64 << 20  # most test data that one probe sends

Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)]
Key = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]  # a packed `checkpoint.memory.slots.Key`
Digest = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
KeyOrNone = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # 0: no snapshot
Endpoints = Annotated[tuple[Endpoint, ...], msgspec.Meta(max_length=MOST_NODE_ENDPOINTS)]
Label = Annotated[str, msgspec.Meta(max_length=MOST_LABEL)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Line = Annotated[str, msgspec.Meta(max_length=500)]
Token = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Term = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Port = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
LoadBytes = Annotated[int, msgspec.Meta(ge=0, le=MOST_LOAD_BYTES)]
Host = Annotated[str, msgspec.Meta(max_length=255)]


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, omit_defaults=True):
    """Base class of everything that crosses a connection after the handshake."""
