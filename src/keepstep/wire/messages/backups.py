"""Messages about which snapshots a node holds, which it should fetch from other nodes, and what is the same in them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from keepstep.wire.messages import limits
from keepstep.wire.messages.limits import Message


class RankKeys(msgspec.Struct, frozen=True, array_like=True):
    """The sealed snapshots of one rank that a node holds."""

    rank: limits.Rank
    keys: Annotated[tuple[limits.Key, ...], msgspec.Meta(max_length=limits.MOST_HELD_KEYS)]


class Inventory(Message, frozen=True):
    """Everything that a node's cache holds. Repeated when that changes, and to every new controller.

    ``keep`` and ``first``: what its workers had been told to keep at that time (see `BackUp`).
    """

    node_rank: int
    own: Annotated[tuple[RankKeys, ...], msgspec.Meta(max_length=limits.MOST_HELD_RANKS)]
    # snapshots of other nodes' ranks
    backups: Annotated[tuple[RankKeys, ...], msgspec.Meta(max_length=limits.MOST_HELD_RANKS)]
    keep: limits.KeyOrNone = 0
    first: limits.KeyOrNone = 0
    able: bool = True  # its ranks have enough slots to be backed up
    endpoints: limits.Endpoints = ()  # where its agent serves snapshots to other nodes
    trouble: limits.Line = ""  # why the last backup could not be fetched
    alike: RankKeys | None = None  # those of its own snapshots that are the same on all ranks of the job


class Locate(Message, frozen=True):
    """Who holds snapshots of these ranks? Answered by `Located`."""

    request: int
    ranks: limits.Ranks


class Pull(msgspec.Struct, frozen=True, array_like=True):
    """Ranks whose target snapshot to fetch, and endpoints that serve it, best first."""

    ranks: limits.Ranks
    endpoints: Annotated[tuple[limits.Endpoints, ...], msgspec.Meta(max_length=limits.MOST_NODE_ENDPOINTS)]


class BackUp(Message, frozen=True):
    """What a node must do so that snapshots survive the loss of a node. Applies until the next one."""

    keep: limits.KeyOrNone = 0  # the snapshot backed up everywhere: nobody may discard it
    # workers keep their oldest snapshot not older than this: it may be the next target
    first: limits.KeyOrNone = 0
    target: limits.KeyOrNone = 0  # the snapshot to back up now
    pulls: Annotated[tuple[Pull, ...], msgspec.Meta(max_length=limits.MOST_HELD_RANKS)] = ()
    ranks: limits.Ranks = ()  # ranks of other nodes whose backups belong on this node
    settled: bool = False  # ``keep`` is on the right nodes: backups of ranks not in ``ranks`` can be deleted


class Holder(msgspec.Struct, frozen=True, array_like=True):
    """A node that holds snapshots of a rank, as its ``own`` or as a backup.

    A rank that was not asked for is named if its snapshots are the same on all ranks of the job.
    """

    rank: limits.Rank
    node_rank: int
    node: str
    own: bool
    keys: Annotated[tuple[limits.Key, ...], msgspec.Meta(max_length=2 * limits.MOST_HELD_KEYS)]
    endpoints: limits.Endpoints


class Located(Message, frozen=True):
    """Answer to `Locate`. ``waits`` says why it is not known yet; ask again."""

    request: int
    holders: Annotated[tuple[Holder, ...], msgspec.Meta(max_length=8 * limits.MOST_HELD_RANKS)] = ()
    waits: Annotated[str, msgspec.Meta(max_length=200)] = ""


class NamedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor whose checksums are told (see `detect.corruption.Tensor`)."""

    name: limits.Line
    kind: limits.Line
    single: bool = False
    decays: bool = False


TensorFamily = Annotated[tuple[NamedTensor, ...], msgspec.Meta(min_length=1, max_length=limits.MOST_KEPT)]


class WhichFamilies(Message, frozen=True):
    """What are the families with this digest? Answered by `Families`."""

    digest: limits.Digest


class Families(Message, frozen=True):
    """Parameters, each with what its optimizer keeps for it, to which `Checksums` refer by their digest."""

    digest: limits.Digest
    families: Annotated[tuple[TensorFamily, ...], msgspec.Meta(max_length=limits.MOST_FAMILIES)]


class RankChecksums(msgspec.Struct, frozen=True, array_like=True):
    """The checksums that are the same on some ranks: 8 bytes, little-endian, for each tensor of the `Families`."""

    ranks: limits.Ranks
    families: limits.Digest  # 0: there are none
    checksums: Annotated[bytes, msgspec.Meta(max_length=8 * limits.MOST_FAMILIES * limits.MOST_KEPT)]


class Checksums(Message, frozen=True):
    """The checksums of parameters and optimizer states in one snapshot of all ranks of a node."""

    node_rank: int
    key: limits.Key
    rows: Annotated[tuple[RankChecksums, ...], msgspec.Meta(max_length=limits.MOST_HELD_RANKS)]


class Doubt(Message, frozen=True):
    """The first snapshot in which replicas differ that must not: it and later ones are a restore's last resort."""

    key: limits.KeyOrNone
