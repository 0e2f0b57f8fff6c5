"""Messages about which snapshots a node holds, and which it should fetch from other nodes."""

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
    """The sealed snapshots of one rank that a node holds."""

    rank: Rank
    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=MOST_HELD_KEYS)]


class Inventory(Message, frozen=True):
    """Everything that a node's cache holds. Repeated when that changes, and to every new controller.

    ``keep`` and ``first``: what its workers had been told to keep at that time (see `BackUp`).
    """

    node_rank: int
    own: Annotated[tuple[RankKeys, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)]
    # snapshots of other nodes' ranks
    backups: Annotated[tuple[RankKeys, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)]
    keep: KeyOrNone = 0
    first: KeyOrNone = 0
    able: bool = True  # its ranks have enough slots to be backed up
    endpoints: Endpoints = ()  # where its agent serves snapshots to other nodes
    trouble: Line = ""  # why the last backup could not be fetched
    alike: RankKeys | None = None  # those of its own snapshots that are the same on all ranks of the job


class Locate(Message, frozen=True):
    """Who holds snapshots of these ranks? Answered by `Located`."""

    request: int
    ranks: Ranks


class Pull(msgspec.Struct, frozen=True, array_like=True):
    """Ranks whose target snapshot to fetch, and endpoints that serve it, best first."""

    ranks: Ranks
    endpoints: Annotated[tuple[Endpoints, ...], msgspec.Meta(max_length=MOST_NODE_ENDPOINTS)]


class BackUp(Message, frozen=True):
    """What a node must do so that snapshots survive the loss of a node. Applies until the next one."""

    keep: KeyOrNone = 0  # the snapshot backed up everywhere: nobody may discard it
    first: KeyOrNone = 0  # workers keep their oldest snapshot not older than this: it may be the next target
    target: KeyOrNone = 0  # the snapshot to back up now
    pulls: Annotated[tuple[Pull, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)] = ()
    ranks: Ranks = ()  # ranks of other nodes whose backups belong on this node
    settled: bool = False  # ``keep`` is on the right nodes: backups of ranks not in ``ranks`` can be deleted


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A node that holds snapshots of a rank, as its ``own`` or as a backup.

    A rank that was not asked for is named if its snapshots are the same on all ranks of the job.
    """

    rank: Rank
    node_rank: int
    node: str
    own: bool
    keys: Annotated[tuple[Key, ...], msgspec.Meta(max_length=2 * MOST_HELD_KEYS)]
    endpoints: Endpoints


class Located(Message, frozen=True):
    """Answer to `Locate`. ``waits`` says why it is not known yet; ask again."""

    request: int
    holders: Annotated[tuple[Holder, ...], msgspec.Meta(max_length=8 * MOST_HELD_RANKS)] = ()
    waits: Annotated[str, msgspec.Meta(max_length=200)] = ""
