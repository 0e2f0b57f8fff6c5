"""Reads ``RUN/status.json`` into columns: of a large job it has a row for each of 131,072 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from keepstep.view.snapshot import RankTable
from keepstep.wire.messages import RankBeat

_COLUMNS = RankBeat.__struct_fields__
_MOST_RANK = (1 << 31) - 1
_MOST_STEP = 1 << 53


class _Beat(msgspec.Struct, array_like=True, gc=False):
    """A `RankBeat`, without the operation in flight, which no viewer needs."""

    rank: int
    step: int
    phase: int
    progress: int
    iteration_s: float = 0.0
    self_s: float = 0.0
    idle_s: float = 0.0
    alive: bool = True
    in_flight: msgspec.Raw = msgspec.Raw()
    overdue_s: float = 0.0
    watched: bool = True


class NodeRow(msgspec.Struct):
    """A node of ``status.json``; the fields that are not of `run_status.NodeStatus` may be missing."""

    node_rank: int
    node: str = ""
    agent: str = "none"
    launcher: str = "gone"
    heard_s_ago: float | None = None
    notices: tuple[str, ...] = ()
    ranks: msgspec.Raw = msgspec.Raw(b"[]")
    sealed_step: int = -1
    backed_up_step: int | None = None
    stored_step: int | None = None
    storage_troubles: tuple[str, ...] = ()


class Backups(msgspec.Struct):
    """As `run_status.BackupStatus`."""

    copies: int = 0
    step: int = -1
    trouble: str = ""


class StatusRows(msgspec.Struct):
    """The fields of ``status.json`` that viewers show."""

    unix_s: float
    state: str = ""
    world_size: int = 0
    newest_step: int = -1
    nodes: tuple[NodeRow, ...] = ()
    rank_columns: tuple[str, ...] = ()
    backups: Backups | None = None
    incarnation: int = 0
    restarts: int = 0
    max_restarts: int = 0
    spares: tuple[str, ...] = ()
    state_s: float = 0.0
    most_nodes: int = 0


_decoder = msgspec.json.Decoder(StatusRows)
_beats = msgspec.json.Decoder(tuple[_Beat, ...])


def read_rows(content: bytes) -> tuple[StatusRows, RankTable]:
    """The content of ``status.json`` and the rows of its ranks.

    Raises msgspec.MsgspecError or UnicodeDecodeError where it is not what keepstep writes, or is of another version.
    """
    status = _decoder.decode(content)
    columns = status.rank_columns
    if columns[: len(_COLUMNS)] != _COLUMNS[: len(columns)]:
        raise msgspec.ValidationError(
            f"columns of ranks of another version of keepstep: {', '.join(columns)}"
        )
    parts: list[npt.NDArray[np.void]] = []
    for node in status.nodes:
        beats = _beats.decode(node.ranks)
        node.ranks = msgspec.Raw()
        if beats:
            parts.append(_rows(node.node_rank, beats))
    return status, rank_table(parts)


_ROW = np.dtype([
    ("rank", "<i4"), ("node", "<i4"), ("step", "<i8"), ("phase", "<i2"), ("iteration_s", "<f4"), ("self_s", "<f4"),
    ("idle_s", "<f4"), ("overdue_s", "<f4"), ("is_alive", "?"), ("is_watched", "?"),
])  # fmt: skip


def _rows(node: int, beats: Sequence[_Beat]) -> npt.NDArray[np.void]:
    if not -1 <= node <= _MOST_RANK:
        raise msgspec.ValidationError(f"node rank {node}")
    rows = [
        (
            b.rank, node, b.step, b.phase, b.iteration_s, b.self_s, b.idle_s, b.overdue_s, b.alive, b.watched,
        )
        for b in beats
        if 0 <= b.rank <= _MOST_RANK and -1 <= b.step < _MOST_STEP and 0 <= b.phase < 1 << 15
    ]  # fmt: skip
    return np.array(rows, _ROW)


def rank_table(parts: Sequence[npt.NDArray[Any]]) -> RankTable:
    """The rows of ranks in the order of ranks; of a rank that two nodes tell of, the row that is further."""
    rows = np.concatenate(parts) if parts else np.zeros(0, _ROW)
    order = np.lexsort((rows["step"], rows["rank"]))
    ranks = rows["rank"][order]
    last = np.append(ranks[1:] != ranks[:-1], True)[: len(ranks)]
    rows = rows.take(order[last])
    return RankTable(**{name: np.ascontiguousarray(rows[name]) for name in _ROW.names or ()})
