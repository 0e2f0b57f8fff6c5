"""Which node holds which snapshots, and which it shall fetch from others."""

from __future__ import annotations

from typing import Annotated

import msgspec

from keepstep.wire.messages.limits import (
    MOST_HELD_KEYS,
    MOST_HELD_RANKS,
    MOST_NODE_ENDPOINTS,
    Endpoints,
    Key,
    KeyOrNone,
    Line,
    Message,
    Rank,
    Ranks,
)


class RankKeys(msgspec.Struct, frozen=True, array_like=True):
    """The sealed snapshots of a rank that a node holds."""

    rank: Rank
    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MOST_HELD_KEYS)]


class Inventory(Message, frozen=True):
    """Everything that a node's cache holds; told again when that changes, and to every new controller.

    ``keep`` and ``first``: what its workers were told to keep when this was looked at (see `BackUp`).
    """

    node_rank: int
    own: Annotated[tuple[RankKeys, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)]
    backups: Annotated[
        tuple[RankKeys, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)
    ]  # of other nodes' ranks
    keep: KeyOrNone = 0
    first: KeyOrNone = 0
    able: bool = True  # its ranks have the slots that it takes to be backed up
    endpoints: Endpoints = ()  # where its agent gives states to others
    trouble: Line = ""  # why the last backup could not be had
    alike: RankKeys | None = None  # of its own, those that are the same on all ranks of the job


class Locate(Message, frozen=True):
    """Who holds snapshots of these ranks? Answered by `Located`."""

    request: int
    ranks: Ranks


class Pull(msgspec.Struct, frozen=True, array_like=True):
    """Ranks whose states of the target are to be brought, and where nodes that have them give them, the best first."""

    ranks: Ranks
    endpoints: Annotated[tuple[Endpoints, ...], msgspec.Meta(max_length=MOST_NODE_ENDPOINTS)]


class BackUp(Message, frozen=True):
    """What a node has to do so that the job's snapshots survive a node's loss. Holds until the next such message."""

    keep: KeyOrNone = 0  # backed up everywhere: nobody gives it up
    first: KeyOrNone = 0  # workers keep their oldest snapshot from this one on: it may be the next target
    target: KeyOrNone = 0  # to be backed up now
    pulls: Annotated[tuple[Pull, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)] = ()
    ranks: Ranks = ()  # of other nodes, whose backups belong on this node
    settled: bool = False  # ``keep`` is where it belongs: backups of other ranks can go


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A node that holds snapshots of a rank, as its ``own`` or as a backup.

    Of another rank than the one asked for: they are the same on all ranks of the job.
    """

    rank: Rank
    node_rank: int
    node: str
    own: bool
    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=2 * MOST_HELD_KEYS)]
    endpoints: Endpoints


class Located(Message, frozen=True):
    """Answer to `Locate`. ``waits``: nobody knows yet, and why; ask again."""

    request: int
    holders: Annotated[tuple[Holder, ...], msgspec.Meta(max_length=8 * MOST_HELD_RANKS)] = ()
    waits: Annotated[str, msgspec.Meta(max_length=200)] = ""
