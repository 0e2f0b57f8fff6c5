"""Which groups are tensor, data and pipeline parallel, from who is in them and what they carry."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.iteration_table import IterationTable, distinct, table_of
from keepstep.core.layout import DIMENSIONS, ParallelLayout
from keepstep.core.summary import SMALL_BYTES, GroupInfo, IterationSummary
from keepstep.locate._stages import Chains, chains

Role = Literal["tp", "dp", "pp", "cp", "ep", "embedding", "world", "control", "unknown"]
Roles = tuple[Role, ...]

# What a group's description suggests.
_HINTS: tuple[tuple[str, Role], ...] = (
    ("tensor", "tp"), ("mesh_tp", "tp"), ("data_parallel", "dp"), ("mesh_dp", "dp"), ("fsdp", "dp"),
    ("replicate", "dp"), ("shard", "dp"), ("pipeline", "pp"), ("mesh_pp", "pp"), ("context", "cp"),
    ("mesh_cp", "cp"), ("expert", "ep"), ("mesh_ep", "ep"), ("embedding", "embedding"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class InferredLayout:
    """The roles of groups by name, and the pipeline stages of the ranks whose stage is known.

    One group may carry several kinds of traffic; its first role is the heaviest.
    """

    roles: Mapping[str, Roles]
    stages: Mapping[int, int]  # by rank, 0 first
    stage_count: int  # 0 when there is no pipeline, or none that can be told

    def groups_with(self, role: Role) -> tuple[str, ...]:
        """Names of the groups that have ``role``."""
        return tuple(name for name, found in self.roles.items() if role in found)


@dataclass(frozen=True, slots=True)
class _Load:
    """The traffic of groups in one kind of operation; means over ranks, iterations and operations."""

    per_iteration: float  # operations of a rank in an iteration
    each_bytes: float
    mean_place: float  # start of an operation, as a share of the iteration


_Family = tuple[int, tuple[int, ...]]  # number of members, distances between neighbouring members


def layout_of(evidence: Evidence) -> InferredLayout:
    """The layout that the operator declared, or else what a few of the iterations suggest."""
    if evidence.layout:
        return declared_layout(ParallelLayout.declared(evidence.layout), evidence.groups)
    rows = evidence.before if len(evidence.before) else evidence.after
    return infer_layout(evidence.groups, table_of(rows).newest_steps())


def infer_layout(groups: Mapping[str, GroupInfo], traffic: Sequence[IterationSummary]) -> InferredLayout:
    """Tell the roles of groups from membership and traffic; ``unknown`` when unsure.

    Messages along a chain make a pipeline. Large reductions that start late in the step are data parallel, gathers
    with later scatters too (FSDP); many that are spread over forward and backward are tensor parallel. Groups of
    equal shape (size and stride) are judged together.

    Args:
        groups: all process groups by name.
        traffic: a few iterations of all ranks; one or two steps are enough.
    """
    table = table_of(traffic)
    pipeline = chains(table)
    families = {name: _family(info) for name, info in groups.items()}
    loads = _loads(families, table)
    by_family: dict[_Family, Role] = {family: _judge(operations) for family, operations in loads.items()}
    members = (info.members for info in groups.values())
    world = set(distinct(table.column("rank")).tolist()).union(*members)
    roles = {
        name: _roles(info, by_family.get(families[name]), pipeline, len(world))
        for name, info in groups.items()
    }
    return InferredLayout(roles, pipeline.stages, pipeline.length)


def declared_layout(layout: ParallelLayout, groups: Mapping[str, GroupInfo]) -> InferredLayout:
    """A layout that the operator declared: roles by membership, stages by coordinates."""
    world = tuple(range(layout.world_size))
    dimensions = [name for name in DIMENSIONS if layout.size(name) > 1]
    roles: dict[str, Roles] = {}
    for name, info in groups.items():
        members = tuple(sorted(info.members))
        found: list[Role] = [
            dimension  # pyright: ignore[reportAssignmentType]
            for dimension in dimensions
            if members and members[-1] < len(world) and members == layout.group_of(members[0], dimension)
        ]
        roles[name] = tuple(found) or ("world" if members == world else "unknown",)
    stages: dict[int, int] = {}
    if layout.pp > 1:
        stages = {rank: int(stage) for rank, stage in enumerate(layout.all_coordinates()["pp"])}
    return InferredLayout(roles, stages, layout.pp if layout.pp > 1 else 0)


def _family(info: GroupInfo) -> _Family:
    """The shape of a group, which is equal for all groups over one dimension of a layout."""
    members = info.members
    strides = set(map(operator.sub, members[1:], members))
    return len(members), tuple(sorted(strides))[:4]


def _loads(families: Mapping[str, _Family], table: IterationTable) -> dict[_Family, dict[int, _Load]]:
    """The traffic of the groups of each family, by operation."""
    numbers = {family: number for number, family in enumerate(dict.fromkeys(families.values()))}
    number_of = {name: numbers[family] for name, family in families.items()}
    known = np.fromiter(map(number_of.get, table.names, itertools.repeat(-1)), np.int64)
    row, streams = table.flat()
    family = known[streams["group"]]
    useful = np.flatnonzero((family >= 0) & (streams["peer"] < 0) & (streams["count"] > 0))
    row, streams, family = row[useful], streams.take(useful), family[useful]
    place = streams["start_s"] / np.maximum(table.column("duration_s")[row], 1e-9)
    keys, which, seen = np.unique(family << 8 | streams["op"], return_inverse=True, return_counts=True)
    weights = (streams["count"], streams["bytes"], place * streams["count"])
    sums: list[list[float]] = [np.bincount(which, weight, len(keys)).tolist() for weight in weights]
    found: list[list[int]] = [(keys >> 8).tolist(), (keys & 0xFF).tolist(), seen.tolist()]
    loads: dict[_Family, dict[int, _Load]] = {}
    names = list(numbers)
    for number, op, rounds, count, nbytes, places in zip(*found, *sums, strict=True):
        load = _Load(count / rounds, nbytes / count, places / count)
        loads.setdefault(names[int(number)], {})[int(op)] = load
    return loads


def _judge(operations: Mapping[int, _Load]) -> Role:
    """The role that the collectives of a family of groups suggest."""
    large = {op: load for op, load in operations.items() if load.each_bytes >= SMALL_BYTES}
    if not large:
        return "control"
    if Op.ALLTOALL in large:
        return "ep"
    gather, scatter = large.get(Op.ALLGATHER), large.get(Op.REDUCE_SCATTER)
    if gather is not None and scatter is not None:
        if scatter.mean_place - gather.mean_place > 0.08 or scatter.mean_place > 0.7:
            return "dp"  # sharded data parallel: gradients are scattered after parameters were gathered
        # Both throughout the step: sequence parallel.
        return "tp" if scatter.per_iteration >= 4 else "unknown"
    reduce = large.get(Op.ALLREDUCE) or scatter
    if reduce is None:
        return "unknown"
    if reduce.mean_place >= 0.62:
        return "dp"
    return "tp" if reduce.mean_place < 0.55 and reduce.per_iteration >= 4 else "unknown"


def _roles(info: GroupInfo, judged: Role | None, pipeline: Chains, world_size: int) -> Roles:
    """The roles of one group. ``judged``: what its collectives suggest, None without any."""
    role: Role = judged or "unknown"
    carries: Role | None = None
    if info.name in pipeline.groups:
        carries = {"pipeline": "pp", "ring": "cp"}.get(pipeline.shape)  # pyright: ignore[reportAssignmentType]
    whole = len(info.members) == world_size and world_size > 1
    stages = sorted(pipeline.stages.get(rank, -1) for rank in info.members)
    if role == "dp" and not whole and pipeline.length >= 2 and stages == [0, pipeline.length - 1]:
        role = "embedding"  # the group joins the first and the last stage of one pipeline
    if judged == "unknown" and carries is None:
        hints: list[Role] = [hinted for word, hinted in _HINTS if word in info.desc.lower()]
        role = hints[0] if hints else role
    if role == "control" and whole:
        role = "world"
    if carries is None:
        return (role,)
    if role in ("unknown", "control", "world"):
        return (carries, "world") if whole else (carries,)
    return (role, carries)
