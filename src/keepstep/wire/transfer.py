"""What agents say to each other to bring a rank's state from one node to another, and to measure the path.

The node that wants it connects and asks; bytes of the state's storages follow a `Following` on the same connection,
outside the frames, as they stand in the slot. Headers and checksums go in frames, so they are authenticated.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from keepstep.wire.messages import MOST_LOAD_BYTES, Message

MOST_RANGE_BYTES = 64 << 20
PIECE_BYTES = 1 << 20

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 56)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
_Word = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]
_Range = Annotated[int, msgspec.Meta(ge=1, le=MOST_RANGE_BYTES)]
_Reason = Annotated[str, msgspec.Meta(max_length=500)]
_Piece = Annotated[bytes, msgspec.Meta(min_length=1, max_length=PIECE_BYTES)]


class Want(Message, frozen=True):
    """A rank's sealed state; what follows is about this one. Answered by `Have` or `Lacks`. ``key``: packed."""

    rank: _Rank
    key: _Word


class SendHeader(Message, frozen=True):
    """Send header and checksums, as `Piece` after `Piece`."""


class SendRange(Message, frozen=True):
    """Send a part of the storages' bytes. Answered by `Following`. Two may be asked for ahead."""

    offset: _Count
    nbytes: _Range


class Have(Message, frozen=True):
    """The commit record of the state, which stays as it is while the connection lasts."""

    step: _Count
    incarnation: _Count
    data_bytes: _Count
    header_bytes: _Count
    storages: _Count
    header_checksum: int


class Lacks(Message, frozen=True):
    """It cannot be had here."""

    reason: _Reason


class Piece(Message, frozen=True):
    """The next bytes of header and checksums."""

    data: _Piece


class Following(Message, frozen=True):
    """As many bytes follow this frame."""

    offset: _Count
    nbytes: _Range


class Ping(Message, frozen=True):
    """As many bytes of load follow this frame. Answered by `Echo` once all of them are there."""

    load_bytes: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOAD_BYTES)] = 0


class Echo(Message, frozen=True):
    """Answer to `Ping`."""


ToHolder = Want | SendHeader | SendRange
FromHolder = Have | Lacks | Piece | Following
