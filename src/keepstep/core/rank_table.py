"""Which process on which node plays which rank: the one fact that every remedy changes."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from keepstep.core.errors import LayoutError
from keepstep.core.ranges import fold_ranks

RANK_TABLE_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """One rank and the process that plays it."""

    rank: int
    node: str
    local_rank: int
    pid: int = 0  # on its node; 0 = not started yet


@dataclass(frozen=True, slots=True)
class RankTable:
    """All placements of one incarnation of the job, in the order of ranks.

    Checked when made: ranks are 0 to n-1 once each, local ranks of a node are 0 to k-1 once each, no
    process plays two ranks. Raises `LayoutError` naming the ranks or node at fault.
    """

    placements: tuple[Placement, ...]
    incarnation: int = 0
    _by_node: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.placements, key=lambda placement: placement.rank))
        object.__setattr__(self, "placements", ordered)
        if self.incarnation < 0:
            raise LayoutError(f"rank table: incarnation {self.incarnation} is negative; the first is 0")
        _check_ranks(ordered)
        by_node: dict[str, list[Placement]] = {}
        for placement in ordered:
            by_node.setdefault(placement.node, []).append(placement)
        for node, here in by_node.items():
            _check_node(node, here)
        object.__setattr__(
            self, "_by_node", {node: tuple(p.rank for p in here) for node, here in by_node.items()}
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.placements)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names, in the order of their lowest rank."""
        return tuple(self._by_node)

    def node_of(self, rank: int) -> str:
        """The node that hosts ``rank``. Raises `LayoutError` for a rank the job does not have."""
        return self.placement(rank).node

    def placement(self, rank: int) -> Placement:
        """Where ``rank`` is played. Raises `LayoutError` for a rank the job does not have."""
        if not 0 <= rank < len(self.placements):
            raise LayoutError(
                f"rank {rank} is not in the rank table, which has ranks 0 to {self.world_size - 1}"
            )
        return self.placements[rank]

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """The ranks that ``node`` hosts, ascending; none for a node that is not in the table."""
        return self._by_node.get(node, ())

    def node_by_rank(self) -> dict[int, str]:
        """Rank to node name, as the locators take it."""
        return {placement.rank: placement.node for placement in self.placements}

    def digest(self) -> str:
        """Hex SHA-256 of the canonical form: equal on all processes exactly when their tables are equal."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(canonical.encode("ascii")).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """A form for JSON."""
        return {
            "schema": RANK_TABLE_SCHEMA,
            "incarnation": self.incarnation,
            "placements": [asdict(placement) for placement in self.placements],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RankTable:
        """The inverse of `to_dict`. Raises `LayoutError` when the data is no possible rank table."""
        if data.get("schema") != RANK_TABLE_SCHEMA:
            raise LayoutError(f"rank table: schema {data.get('schema')!r} is not {RANK_TABLE_SCHEMA}")
        try:
            rows = cast("Iterable[Mapping[str, Any]]", data["placements"])
            placements = tuple(
                Placement(int(row["rank"]), str(row["node"]), int(row["local_rank"]), int(row.get("pid", 0)))
                for row in rows
            )
            return cls(placements, int(data["incarnation"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LayoutError(f"rank table: a field is missing or has the wrong type ({error!r})") from error


def _check_ranks(ordered: tuple[Placement, ...]) -> None:
    if not ordered:
        raise LayoutError("rank table: no rank is placed")
    ranks = [placement.rank for placement in ordered]
    if ranks == list(range(len(ranks))):
        return
    repeated = {first for first, second in itertools.pairwise(ranks) if first == second}
    if repeated:
        raise LayoutError(f"rank table: ranks {fold_ranks(repeated)} are placed more than once")
    if ranks[0] < 0:
        raise LayoutError(f"rank table: rank {ranks[0]} is negative")
    absent = sorted(set(range(len(ranks))) - set(ranks))
    raise LayoutError(f"rank table: {len(ranks)} ranks are placed, but ranks {fold_ranks(absent)} are not")


def _check_node(node: str, here: list[Placement]) -> None:
    if not node:
        raise LayoutError(f"rank table: rank {here[0].rank} has no node name")
    local = sorted(placement.local_rank for placement in here)
    if local != list(range(len(local))):
        raise LayoutError(
            f"rank table: node {node} has local ranks {local}; they must be 0 to {len(local) - 1}"
        )
    pids = [placement.pid for placement in here if placement.pid]
    if len(set(pids)) != len(pids):
        raise LayoutError(f"rank table: one process of node {node} plays two ranks (pids {sorted(pids)})")
