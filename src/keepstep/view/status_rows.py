"""Reads ``RUN/status.json``, and the file beside it that has the rows of ranks of a large job."""

from __future__ import annotations

from typing import Any

import msgspec

from keepstep.view.rank_table import joined, rank_table
from keepstep.view.run_snapshot import NodeView, RankTable
from keepstep.wire.messages import RankBeat

_COLUMNS = RankBeat.__struct_fields__


class NodeRow(msgspec.Struct):
    """A node, as `run_status.NodeStatus` has it; earlier versions did not write the last fields."""

    node_rank: int
    node: str = ""
    agent: str = "none"
    launcher: str = "gone"
    heard_s_ago: float | None = None
    notices: tuple[str, ...] = ()
    ranks: tuple[RankBeat, ...] = ()
    sealed_step: int | None = None
    backed_up_step: int | None = None
    stored_step: int | None = None
    storage_troubles: tuple[str, ...] | None = None


class Backups(msgspec.Struct):
    """As `run_status.BackupStatus`."""

    copies: int = 0
    step: int = -1
    trouble: str = ""


class StatusRows(msgspec.Struct):
    """The fields of a status that viewers show. Once it is read its nodes have no rows of ranks any more."""

    unix_s: float
    state: str = ""
    world_size: int = 0
    newest_step: int = -1
    open_incidents: tuple[int, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    rank_columns: tuple[str, ...] = _COLUMNS
    backups: Backups | None = None
    incarnation: int = 0
    restarts: int = 0
    max_restarts: int = 0
    spares: tuple[str, ...] = ()
    state_s: float = 0.0
    most_nodes: int = 0
    ranks_file: str = ""
    unwatched_since_unix_s: float = 0.0
    thresholds: dict[str, str] = {}


class CheckpointState(msgspec.Struct):
    """The content of ``nodes/*/checkpoints.json``."""

    storage: str = ""
    on_the_way: tuple[int, ...] = ()
    newest: int | None = None
    troubles: tuple[str, ...] = ()


_status = msgspec.json.Decoder(StatusRows)
_nodes = msgspec.msgpack.Decoder(list[msgspec.Raw])
_beats = msgspec.msgpack.Decoder(tuple[int, tuple[RankBeat, ...]])
_AT_ONCE = 1024  # nodes whose rows are objects at one time: those of a large job take 50 MB


def read_status(content: bytes) -> tuple[StatusRows, RankTable | None]:
    """The content of ``status.json`` and the rows of ranks; None where these are in a file beside it.

    Raises msgspec.MsgspecError or UnicodeDecodeError where it is not what keepstep writes, or is of another version.
    """
    status = _status.decode(content)
    columns = status.rank_columns
    if columns[: len(_COLUMNS)] != _COLUMNS[: len(columns)]:
        raise msgspec.ValidationError(f"rows of ranks as another version of keepstep writes them: {columns}")
    table = None if status.ranks_file else rank_table((node.node_rank, node.ranks) for node in status.nodes)
    for node in status.nodes:
        node.ranks = ()
    return status, table


def status_from(told: dict[str, Any]) -> StatusRows:
    """The status that a controller has told a viewer. Raises msgspec.MsgspecError where it makes no sense."""
    return msgspec.convert(told, StatusRows, strict=False)


def read_rank_rows(content: bytes) -> RankTable:
    """The file of the rows of ranks. Raises msgspec.MsgspecError where it is not what keepstep writes."""
    packed = _nodes.decode(content)
    firsts = range(0, len(packed), _AT_ONCE)
    return joined([rank_table(map(_beats.decode, packed[one : one + _AT_ONCE])) for one in firsts])


def node_view(row: NodeRow, status: StatusRows, checkpoints: CheckpointState | None) -> NodeView:
    """A node as it is shown; ``checkpoints``: what its folder says of them, for statuses of earlier versions."""
    backed_up, stored, troubles = -1, -1, ()
    if status.backups is not None:
        backed_up = status.backups.step
    if checkpoints is not None:
        stored = -1 if checkpoints.newest is None else checkpoints.newest
        troubles = checkpoints.troubles
    return NodeView(
        row.node_rank,
        row.node,
        row.agent,
        row.launcher,
        row.heard_s_ago,
        row.notices,
        backed_up if row.sealed_step is None else row.sealed_step,
        backed_up if row.backed_up_step is None else row.backed_up_step,
        stored if row.stored_step is None else row.stored_step,
        troubles if row.storage_troubles is None else row.storage_troubles,
    )
