"""What slow ranks and links cost the step: the steps of some pipelines replayed with and without them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from keepstep.core.errors import TraceError
from keepstep.core.events import Op
from keepstep.core.incident import Link
from keepstep.core.iteration_table import of_ranks
from keepstep.core.operations import Operation, OperationKind
from keepstep.core.summary import BlockSummary, GroupInfo, IterationSummary, StreamSummary
from keepstep.locate.clocks import ClockOffsets, Clocks
from keepstep.locate.infer import InferredLayout
from keepstep.locate.what_if import StepGraph, step_graphs

Floats = npt.NDArray[np.float64]
_Key = tuple[int, OperationKind, int]  # rank, kind, index
Excess = Mapping[int, Floats]  # position of an operation in the graph -> its seconds per step, were all well

_TRUE_WITHIN = 0.2  # of the step's time: a replay further off than that proves nothing
_NOTHING = 0.01  # of a healthy step
_LITTLE = 0.1  # of what all culprits cost together
_MANY = 1 << 20  # more than a rank receives in a step
_SMALL_BYTES = 1024  # per operation
_P2P = (int(Op.SEND), int(Op.RECV))


@dataclass(frozen=True, slots=True)
class _Job:
    groups: Mapping[str, GroupInfo]
    layout: InferredLayout
    nodes: Mapping[int, str]
    offsets: ClockOffsets | None

    def on_one_clock(self, rank: int, time_s: float) -> float:
        return (
            time_s if self.offsets is None else self.offsets.to_reference_s(self.nodes.get(rank, ""), time_s)
        )


class StepCosts:
    """The slow steps as a graph, and what its operations take in healthy ones."""

    def __init__(
        self, graph: StepGraph, healthy: Mapping[_Key, float], job: _Job, unexplained_s: float
    ) -> None:
        self._graph, self._healthy, self._job = graph, healthy, job
        self._unexplained_s = unexplained_s
        self.actual_s = self.without()

    @property
    def ranks(self) -> Iterable[int]:
        """Whose blocks are in the graph."""
        return self._graph.stage_of

    def of_rank(self, rank: int, only: tuple[str, int] | None = None) -> Excess:
        """The passes of a rank, or ``only`` one (kind, index), as they usually are."""
        passes = ("forward", "backward")
        return self._usual(lambda key: key[0] == rank and (key[1:] == only if only else key[1] in passes))

    def of_link(self, link: Link, after: Sequence[IterationSummary]) -> Excess:
        """All transfers between its nodes, or inside the one; none where some of them are not in the graph."""
        nodes, ends = self._job.nodes, set(link.nodes)

        def crosses(rank: int, other: int) -> bool:
            return rank != other and {nodes.get(rank), nodes.get(other)} == ends

        if any(self._is_left_out(row, crosses) for row in of_ranks(after, link.ranks)):
            return {}
        return self._usual(lambda key: any(crosses(key[0], other) for other in self._others(key)))

    def without(self, *causes: Excess) -> float:
        """Mean seconds of a step had these been as usual."""
        durations: Floats = np.array(self._graph.durations)
        for cause in causes:
            for place, seconds in cause.items():
                durations[place] = seconds
        return float(self._graph.replay(durations).mean())

    def absorbed(self, causes: Sequence[Excess]) -> list[bool]:
        """Of each cause whether it costs nothing as things are, nor would were the others mended.

        What the step is longer by and the graph does not show may be any cause's: a sender that waited for its message.
        """
        least_s, unknown_s = self.without(*causes), self._unexplained_s
        bar_s = max(_LITTLE * (self.actual_s + unknown_s - least_s), _NOTHING * least_s)
        found: list[bool] = []
        for place, cause in enumerate(causes):
            now_s = self.actual_s - self.without(cause)
            alone_s = self.without(*causes[:place], *causes[place + 1 :]) - least_s
            found.append(max(now_s, alone_s) + unknown_s < bar_s)
        return found

    def _usual(self, chosen: Callable[[_Key], bool]) -> Excess:
        durations = self._graph.durations
        return {
            place: np.minimum(durations[place], self._healthy[node.key])
            for place, node in enumerate(self._graph.nodes)
            if node.key in self._healthy and chosen(node.key)
        }

    def _others(self, key: _Key) -> Iterable[int]:
        """Who a rank's transfer is with."""
        rank, kind, _ = key
        graph = self._graph
        if kind == "grads-sync":
            return [other for other, stage in graph.stage_of.items() if stage == graph.stage_of[rank]]
        if not kind.endswith("-recv"):
            return ()
        toward = -1 if kind.startswith("forward") else 1
        stage = (graph.stage_of[rank] + toward) % (1 + max(graph.stage_of.values()))
        home = graph.replica_of[rank]
        return [r for r, s in graph.stage_of.items() if s == stage and graph.replica_of[r] == home]

    def _is_left_out(self, row: IterationSummary, crosses: Callable[[int, int], bool]) -> bool:
        """Whether the iteration has a collective across that is not one operation of the graph."""
        for stream in row.streams:
            info = self._job.groups.get(stream.group)
            if stream.op in _P2P or info is None or stream.bytes <= _SMALL_BYTES * stream.count:
                continue
            among = any(crosses(one, other) for one in info.members for other in info.members if one < other)
            if among and not _is_sync(stream, self._job.layout):
                return True
        return False


def step_costs(
    blocks: Sequence[BlockSummary],
    onset_step: int,
    before: Sequence[IterationSummary],
    after: Sequence[IterationSummary],
    groups: Mapping[str, GroupInfo],
    layout: InferredLayout,
    nodes: Mapping[int, str],
    clocks: Clocks | None,
) -> StepCosts | None:
    """The steps since ``onset_step`` that all ranks with blocks have told of; None where no true graph can be had."""
    ranks = {one.rank for one in blocks}
    names = {nodes.get(rank, "") for rank in ranks}
    offsets = clocks and clocks.among(names)
    if offsets is None and len(names) > 1:
        return None
    layout = replace(layout, stages=_stages(ranks, groups, layout))
    if len(set(layout.stages.values())) > 1 and not ranks <= layout.stages.keys():
        return None
    job = _Job(groups, layout, nodes, offsets)
    since = _graph([one for one in blocks if one.step >= onset_step], after, ranks, job)
    if since is None:
        return None
    actual_s, since_s = _measured(since, after, ranks)
    if abs(since_s) > _TRUE_WITHIN * actual_s:
        return None
    usual = _graph([one for one in blocks if one.step < onset_step], before, ranks, job)
    if usual is None:
        return StepCosts(since, {}, job, 0.0)
    medians: Floats = np.median(usual.durations, axis=1)
    healthy = {node.key: float(medians[place]) for place, node in enumerate(usual.nodes)}
    longer_s = max(since_s - _measured(usual, before, ranks)[1], 0.0)
    return StepCosts(since, healthy, job, longer_s + _waited_for_others_s(since, healthy, ranks, job))


def _waited_for_others_s(
    graph: StepGraph, healthy: Mapping[_Key, float], ranks: set[int], job: _Job
) -> float:
    """By how much the collectives at a step's end grew that also wait for ranks of which nothing is known."""
    partial: set[_Key] = set()
    for name in job.layout.groups_with("dp"):
        members = job.groups[name].members if name in job.groups else ()
        if not ranks.issuperset(members):
            partial |= {(rank, "grads-sync", 0) for rank in ranks.intersection(members)}
    if any(node.key[1] == "local" for node in graph.nodes):  # a part of a pipeline is silent
        partial |= {(rank, "norm-sync", 0) for rank in ranks}
    grown = {"grads-sync": 0.0, "norm-sync": 0.0}
    for place, node in enumerate(graph.nodes):
        if node.key in partial and node.key in healthy:
            kind, longer_s = node.key[1], float(graph.durations[place].mean()) - healthy[node.key]
            grown[kind] = max(grown[kind], longer_s)
    return sum(grown.values())


def _stages(ranks: set[int], groups: Mapping[str, GroupInfo], layout: InferredLayout) -> dict[int, int]:
    """Also of ranks that silent ones part from their pipeline: their replicas' in the same reduction."""
    found = {rank: stage for rank, stage in layout.stages.items() if rank in ranks}
    for name in layout.groups_with("dp"):
        members = groups[name].members if name in groups else ()
        known = next((found[rank] for rank in members if rank in found), None)
        if known is not None:
            found.update((rank, known) for rank in ranks.intersection(members) if rank not in found)
    return found


def _measured(graph: StepGraph, rows: Sequence[IterationSummary], ranks: set[int]) -> tuple[float, float]:
    """Mean seconds of the graph's steps as the ranks tell them, and how much of it a replay does not show."""
    told = [row.duration_s for row in of_ranks(rows, sorted(ranks)) if row.step in graph.steps]
    seconds = float(np.mean(told))
    return seconds, seconds - float(graph.replay(graph.durations).mean())


def _graph(
    blocks: Sequence[BlockSummary], rows: Sequence[IterationSummary], ranks: set[int], job: _Job
) -> StepGraph | None:
    iterations = {(one.rank, one.step): one for one in of_ranks(rows, sorted(ranks))}
    homes = _homes(blocks)
    by_step: dict[int, list[BlockSummary]] = defaultdict(list)
    for one in blocks:
        by_step[one.step].append(one)
    operations: list[Operation] = []
    for step, here in by_step.items():
        if {one.rank for one in here} == ranks and all((rank, step) in iterations for rank in ranks):
            operations += _operations(here, {rank: iterations[rank, step] for rank in ranks}, homes, job)
    try:
        return step_graphs(operations)[0] if operations else None
    except TraceError:  # an order of blocks that no message explains
        return None


def _homes(blocks: Sequence[BlockSummary]) -> dict[int, int]:
    """Rank -> lowest rank of its pipeline replica."""
    home = {one.rank: one.rank for one in blocks}
    pairs = {(one.rank, one.peer) for one in blocks if one.peer in home}
    for _ in range(len(home)):
        changed = False
        for rank, peer in pairs:
            low = min(home[rank], home[peer])
            changed = changed or (home[rank], home[peer]) != (low, low)
            home[rank] = home[peer] = low
        if not changed:
            break
    return home


def _operations(
    blocks: Sequence[BlockSummary],
    iterations: Mapping[int, IterationSummary],
    homes: Mapping[int, int],
    job: _Job,
) -> list[Operation]:
    """One step's passes, messages and gradient reductions; all ranks meet at its end."""
    stages = job.layout.stages
    last = max((stages.get(rank, 0) for rank in iterations), default=0)
    found: list[Operation] = []

    def add(rank: int, kind: OperationKind, index: int, start_s: float, seconds: float) -> None:
        at_s = job.on_one_clock(rank, start_s)
        step = iterations[rank].step
        found.append(Operation(rank, step, homes[rank], stages.get(rank, 0), kind, index, at_s, seconds))

    done = {rank: row.start_s for rank, row in iterations.items()}
    for one in blocks:
        if one.kind == "forward" or one.kind == "backward":
            add(one.rank, one.kind, one.index, one.start_s, one.own_s)
            done[one.rank] = max(done[one.rank], one.start_s + one.own_s)
        elif (
            one.peer not in iterations
        ):  # silent: what it sends comes as long after the rank's own pass as it did
            if one.kind == "recv":
                add(
                    one.rank,
                    "local",
                    one.peer * _MANY + one.index,
                    one.start_s + one.own_s,
                    one.duration_s - one.own_s,
                )
        elif one.peer in stages:
            downstream = _is_downstream(stages.get(one.rank, 0), stages[one.peer], last)
            kind: OperationKind
            if one.kind == "send":
                kind = "forward-send" if downstream else "backward-send"
            else:
                kind = "backward-recv" if downstream else "forward-recv"
            add(one.rank, kind, one.index, one.start_s, one.duration_s)
    for rank, row in iterations.items():
        for stream in row.streams:
            ends_s = row.start_s + stream.end_s
            if _is_sync(stream, job.layout) and ends_s > done[rank]:
                begins_s = max(row.start_s + stream.start_s, done[rank])
                add(rank, "grads-sync", 0, begins_s, ends_s - begins_s)
                done[rank] = ends_s
        add(rank, "norm-sync", 0, done[rank], max(row.start_s + row.duration_s - done[rank], 0.0))
    return found


def _is_sync(stream: StreamSummary, layout: InferredLayout) -> bool:
    """The one reduction of a rank's gradients."""
    role = layout.roles.get(stream.group)
    is_dp = role is not None and role.role == "dp"
    return is_dp and stream.op not in _P2P and stream.count == 1 and stream.bytes > _SMALL_BYTES


def _is_downstream(stage: int, other: int, last: int) -> bool:
    """Whether ``other`` is the next stage; with interleaved stages the last one's next is the first."""
    if last >= 2 and {stage, other} == {0, last}:
        return stage == last
    return other > stage
