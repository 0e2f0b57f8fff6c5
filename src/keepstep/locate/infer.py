"""Which groups are tensor, data and pipeline parallel, from who is in them and what they carry."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from keepstep.core.events import Op
from keepstep.core.iteration_table import IterationTable, column, distinct
from keepstep.core.layout import DIMENSIONS, ParallelLayout
from keepstep.core.summary import GroupInfo, IterationSummary
from keepstep.locate._stages import Chains, chains

Role = Literal["tp", "dp", "pp", "cp", "ep", "embedding", "world", "control", "unknown"]
Confidence = Literal["high", "medium", "low"]

_SMALL_BYTES = 1024  # per operation: losses, norms, flags, barriers
_HINTS: tuple[tuple[str, Role], ...] = (
    ("tensor", "tp"), ("mesh_tp", "tp"), ("data_parallel", "dp"), ("mesh_dp", "dp"), ("fsdp", "dp"),
    ("replicate", "dp"), ("shard", "dp"), ("pipeline", "pp"), ("mesh_pp", "pp"), ("context", "cp"),
    ("mesh_cp", "cp"), ("expert", "ep"), ("mesh_ep", "ep"), ("embedding", "embedding"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupRole:
    """What a group is for. One group may carry several kinds of traffic; the first role is the heaviest."""

    roles: tuple[Role, ...]
    confidence: Confidence
    reason: str

    @property
    def role(self) -> Role:
        return self.roles[0]


@dataclass(frozen=True, slots=True)
class InferredLayout:
    """Roles of groups by name, pipeline stages by rank (only of ranks whose stage can be told)."""

    roles: Mapping[str, GroupRole]
    stages: Mapping[int, int]
    stage_count: int  # 0 when there is no pipeline, or none that can be told
    stage_confidence: Confidence
    sizes: Mapping[str, int]  # members per group of each role told

    def stage_of(self, rank: int) -> int | None:
        """The rank's pipeline stage, 0 first; None when it cannot be told."""
        return self.stages.get(rank)

    def groups_with(self, role: Role) -> tuple[str, ...]:
        """Names of the groups that have ``role``."""
        return tuple(name for name, found in self.roles.items() if role in found.roles)


@dataclass(slots=True)
class _Load:
    """What groups carry by one operation, summed over ranks and iterations."""

    seen: int = 0
    count: int = 0
    nbytes: int = 0
    place: float = 0.0  # sum over operations of the start, as a share of the iteration

    def add(self, count: int, nbytes: int, place: float) -> None:
        self.seen += 1
        self.count += count
        self.nbytes += nbytes
        self.place += place * count

    @property
    def each_bytes(self) -> float:
        return self.nbytes / max(self.count, 1)

    @property
    def per_iteration(self) -> float:
        return self.count / max(self.seen, 1)

    @property
    def mean_place(self) -> float:
        return self.place / max(self.count, 1)


_Family = tuple[int, tuple[int, ...]]


def infer_layout(groups: Mapping[str, GroupInfo], traffic: Sequence[IterationSummary]) -> InferredLayout:
    """Tell the roles of groups from membership and traffic; ``unknown`` when unsure.

    Messages along a chain make a pipeline. Large reductions that start late in the step are data parallel, gathers
    with later scatters too (FSDP); many that are spread over forward and backward are tensor parallel. Groups of
    equal shape (size and stride) are judged together.

    Args:
        groups: all process groups by name.
        traffic: a few iterations of all ranks; one or two steps are enough.
    """
    pipeline = chains(traffic)
    families = {name: _family(info) for name, info in groups.items()}
    loads = _loads(families, traffic)
    by_family: dict[_Family, tuple[Role, Confidence, str]] = {}
    for family, operations in loads.items():
        by_family[family] = _judge(operations)
    members = (info.members for info in groups.values())
    world = set(distinct(column(traffic, "rank")).tolist()).union(*members)
    roles = {
        name: _role(info, by_family.get(families[name]), pipeline, len(world))
        for name, info in groups.items()
    }
    sizes: dict[str, int] = {}
    for name, found in roles.items():
        for role in found.roles:
            if role not in ("unknown", "world", "control") and not (
                role == "pp" and pipeline.shape == "pipeline"
            ):
                sizes[role] = max(sizes.get(role, 0), len(groups[name].members))
    if pipeline.shape == "pipeline":
        sizes["pp"] = pipeline.length
    confidence: Confidence = "high" if pipeline.even else "medium" if pipeline.stages else "low"
    return InferredLayout(roles, pipeline.stages, pipeline.length, confidence, sizes)


def declared_layout(layout: ParallelLayout, groups: Mapping[str, GroupInfo]) -> InferredLayout:
    """The same from a layout that the operator declared: roles by membership, stages by coordinates."""
    world = tuple(range(layout.world_size))
    dimensions = [name for name in DIMENSIONS if layout.size(name) > 1]
    roles: dict[str, GroupRole] = {}
    for name, info in groups.items():
        members = tuple(sorted(info.members))
        found: list[Role] = [
            dimension  # pyright: ignore[reportAssignmentType]
            for dimension in dimensions
            if members and members[-1] < len(world) and members == layout.group_of(members[0], dimension)
        ]
        if not found:
            found = ["world" if members == world else "unknown"]
        roles[name] = GroupRole(tuple(found), "high", f"declared layout {layout}")
    stages: dict[int, int] = {}
    if layout.pp > 1:
        stages = {rank: int(stage) for rank, stage in enumerate(layout.all_coordinates()["pp"])}
    sizes = {dimension: layout.size(dimension) for dimension in dimensions}
    return InferredLayout(roles, stages, layout.pp if layout.pp > 1 else 0, "high", sizes)


def _family(info: GroupInfo) -> _Family:
    """Size and strides: the same for all groups over one dimension of a layout."""
    members = info.members
    strides = set(map(operator.sub, members[1:], members))
    return len(members), tuple(sorted(strides))[:4]


def _loads(
    families: Mapping[str, _Family], traffic: Sequence[IterationSummary]
) -> dict[_Family, dict[int, _Load]]:
    if isinstance(traffic, IterationTable):
        return _table_loads(families, traffic)
    loads: dict[_Family, dict[int, _Load]] = {}
    for summary in traffic:
        for stream in summary.streams:
            family = families.get(stream.group)
            if family is None or stream.peer >= 0 or stream.count == 0:
                continue
            load = loads.setdefault(family, {}).setdefault(stream.op, _Load())
            load.add(stream.count, stream.bytes, stream.start_s / max(summary.duration_s, 1e-9))
    return loads


def _table_loads(families: Mapping[str, _Family], table: IterationTable) -> dict[_Family, dict[int, _Load]]:
    """The same from columns."""
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
    for number, op, many, count, nbytes, mean in zip(*found, *sums, strict=True):
        loads.setdefault(names[int(number)], {})[int(op)] = _Load(int(many), int(count), int(nbytes), mean)
    return loads


def _judge(operations: Mapping[int, _Load]) -> tuple[Role, Confidence, str]:
    """The role that the collectives of a family of groups speak for."""
    large = {op: load for op, load in operations.items() if load.each_bytes >= _SMALL_BYTES}
    if not large:
        return "control", "high", "small operations only"
    if Op.ALLTOALL in large:
        return "ep", "medium", "all-to-all exchanges"
    gather, scatter = large.get(Op.ALLGATHER), large.get(Op.REDUCE_SCATTER)
    if gather is not None and scatter is not None:
        later = scatter.mean_place - gather.mean_place
        told = f"{gather.per_iteration:.0f} gathers, {scatter.per_iteration:.0f} scatters a step"
        if later > 0.08 or scatter.mean_place > 0.7:
            return "dp", "high", f"{told}, scatters later: sharded data parallel"
        if scatter.per_iteration >= 4:
            return "tp", "medium", f"{told}, both throughout the step: sequence parallel"
        return "unknown", "low", told
    reduce = large.get(Op.ALLREDUCE) or scatter
    if reduce is None:
        return "unknown", "low", "neither reductions nor gathers with scatters"
    count, place = reduce.per_iteration, reduce.mean_place
    told = (
        f"{count:.0f} reductions of {reduce.each_bytes / 1e6:.2g} MB a step, at {place:.0%} of it on average"
    )
    if place >= 0.62:
        return "dp", "high" if place >= 0.7 or count <= 2 else "medium", told
    if place < 0.55 and count >= 4:
        return "tp", "high" if count >= 8 else "medium", told
    return "unknown", "low", told


def _role(
    info: GroupInfo,
    judged: tuple[Role, Confidence, str] | None,
    pipeline: Chains,
    world_size: int,
) -> GroupRole:
    role, confidence, reason = judged or ("unknown", "low", "no traffic")
    carries: Role | None = None
    if info.name in pipeline.groups:
        carries = {"pipeline": "pp", "ring": "cp"}.get(pipeline.shape)  # pyright: ignore[reportAssignmentType]
    whole = len(info.members) == world_size and world_size > 1
    if role == "dp" and not whole and _is_embedding(info, pipeline):
        role, confidence, reason = "embedding", "medium", "reduced between first and last stage"
    if role == "unknown" and carries is None:
        hinted = _hint(info.desc)
        if hinted is not None and reason != "no traffic":
            return GroupRole((hinted,), "medium", f"{reason}; called {info.desc}")
    if role == "control" and whole:
        role = "world"
    if carries is None:
        return GroupRole((role,), confidence, reason)
    sure: Confidence = "high" if pipeline.even else "medium"
    told = "messages along a chain of ranks" if carries == "pp" else "messages around a ring"
    if role in ("unknown", "control", "world"):
        extra: tuple[Role, ...] = ("world",) if whole else ()
        return GroupRole((carries, *extra), sure, told)
    return GroupRole((role, carries), confidence, f"{reason}; {told}")


def _is_embedding(info: GroupInfo, pipeline: Chains) -> bool:
    stages = sorted(pipeline.stages.get(rank, -1) for rank in info.members)
    return pipeline.length >= 2 and stages == [0, pipeline.length - 1]


def _hint(desc: str) -> Role | None:
    text = desc.lower()
    return next((role for word, role in _HINTS if word in text), None)
