"""Messages between agents to bring a rank's state from one node to another, and to measure the path.

The node that wants a state connects and asks. The bytes of the state's storages come after a `Following` on the same
connection, outside the frames, unchanged from the slot. Header and checksums come in frames, so they are authenticated.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from keepstep.wire.messages import Message
from keepstep.wire.messages.limits import Key, Line, LoadBytes, Rank

MOST_RANGE_BYTES = 64 << 20
PIECE_BYTES = 1 << 20

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 56)]
_Range = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANGE_BYTES)]


class Want(Message, frozen=True):
    """Asks for a rank's sealed state, which the next requests are about. Answered by `Have` or `Lacks`."""

    rank: Rank
    key: Key


class SendHeader(Message, frozen=True):
    """Asks for header and checksums. Answered by as many `Piece` as they need."""


class SendRange(Message, frozen=True):
    """Asks for a part of the storages' bytes. Answered by `Following`. Two requests may be under way at a time."""

    offset: _Count
    nbytes: _Range


class Have(Message, frozen=True):
    """The commit record of the state, which does not change while the connection lasts."""

    step: _Count
    incarnation: _Count
    data_bytes: _Count
    header_bytes: _Count
    storages: _Count
    header_checksum: int


class Lacks(Message, frozen=True):
    """The sender cannot give this state."""

    reason: Line


class Piece(Message, frozen=True):
    """The next bytes of header and checksums."""

    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PIECE_BYTES)]


class Following(Message, frozen=True):
    """This part of the storages follows the frame."""

    offset: _Count
    nbytes: _Range


class Ping(Message, frozen=True):
    """As many bytes of load follow this frame. Answered by `Echo` once all of them have come."""

    load_bytes: LoadBytes = 0


class Echo(Message, frozen=True):
    """Answer to `Ping`."""


ToHolder = Want | SendHeader | SendRange
FromHolder = Have | Lacks | Piece | Following
