"""What slow ranks and links cost the step: the steps of some pipelines are replayed with and without their delay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keepstep.core.errors import TraceError
from keepstep.core.events import MESSAGES
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Link
from keepstep.core.iteration_table import table_of
from keepstep.core.node_clocks import ClockOffsets
from keepstep.core.summary import SMALL_BYTES, BlockSummary, GroupInfo, IterationSummary, StreamSummary
from keepstep.core.traced_operations import Operation, OperationKind
from keepstep.locate._components import lowest_connected
from keepstep.locate.infer import InferredLayout
from keepstep.locate.what_if import COMPUTE, Floats, Key, StepGraph, step_graphs

Excess = Mapping[int, Floats]  # position of an operation in the graph -> its seconds per step, were all well

_TRUE_WITHIN = 0.2  # part of the step's time; a replay that is further off proves nothing
_NOTHING = 0.01  # part of a healthy step that a culprit must cost not to be absorbed
_LITTLE = 0.1  # part of what all culprits cost together that a culprit must cost not to be absorbed
_MANY = 1 << 20  # more than a rank receives in a step


@dataclass(frozen=True, slots=True)
class _Job:
    """The facts about a job that are needed to rebuild its steps."""

    groups: Mapping[str, GroupInfo]
    layout: InferredLayout
    nodes: Mapping[int, str]
    offsets: ClockOffsets | None

    def reducing(self) -> list[tuple[int, ...]]:
        """The members of each group that reduces gradients."""
        return [self.groups[name].members for name in self.layout.groups_with("dp") if name in self.groups]


class StepCosts:
    """The slow steps as a graph, with the time that each operation takes in healthy steps."""

    def __init__(
        self, graph: StepGraph, healthy: Mapping[Key, float], job: _Job, unexplained_s: float
    ) -> None:
        self._graph, self._healthy, self._job = graph, healthy, job
        self._unexplained_s = unexplained_s
        self.actual_s = self.without()

    def of_rank(self, rank: int, only: tuple[str, int] | None = None) -> Excess:
        """The usual times of a rank's passes, or of ``only`` one (kind, index)."""
        return self._usual(lambda key: key[0] == rank and (key[1:] == only if only else key[1] in COMPUTE))

    def of_link(self, link: Link, after: Sequence[IterationSummary]) -> Excess:
        """All transfers between the link's nodes, or inside its one; none where some of them are not in the graph."""
        nodes, ends = self._job.nodes, set(link.nodes)

        def crosses(rank: int, other: int) -> bool:
            return rank != other and {nodes.get(rank), nodes.get(other)} == ends

        if any(self._is_left_out(row, crosses) for row in table_of(after).of_ranks(link.ranks)):
            return {}
        return self._usual(lambda key: any(crosses(key[0], other) for other in self._others(key)))

    def without(self, *causes: Excess) -> float:
        """Mean seconds of a step, had these operations been as usual."""
        durations: Floats = np.array(self._graph.durations)
        for cause in causes:
            for place, seconds in cause.items():
                durations[place] = seconds
        return float(self._graph.replay(durations).mean())

    def absorbed(self, causes: Sequence[Excess]) -> list[bool]:
        """For each cause, whether it costs nothing now and would cost nothing if the other causes were mended.

        Any cause may also account for the part of the slowdown that the graph does not show, such as a sender that
        waited for its message.
        """
        least_s, unknown_s = self.without(*causes), self._unexplained_s
        bar_s = max(_LITTLE * (self.actual_s + unknown_s - least_s), _NOTHING * least_s)
        found: list[bool] = []
        for place, cause in enumerate(causes):
            now_s = self.actual_s - self.without(cause)
            alone_s = self.without(*causes[:place], *causes[place + 1 :]) - least_s
            found.append(max(now_s, alone_s) + unknown_s < bar_s)
        return found

    def _usual(self, chosen: Callable[[Key], bool]) -> Excess:
        durations = self._graph.durations
        return {
            place: np.minimum(durations[place], self._healthy[node.key])
            for place, node in enumerate(self._graph.nodes)
            if node.key in self._healthy and chosen(node.key)
        }

    def _others(self, key: Key) -> Iterable[int]:
        """The ranks that a rank exchanges data with in an operation."""
        rank, kind, _ = key
        if kind == "grads-sync":
            return self._graph.placing.members(rank, kind)
        source = self._graph.placing.source(rank, kind)
        return () if source is None else (source,)

    def _is_left_out(self, row: IterationSummary, crosses: Callable[[int, int], bool]) -> bool:
        """Whether the iteration has a collective across the link that is not one operation of the graph."""
        for stream in row.streams:
            info = self._job.groups.get(stream.group)
            if stream.op in MESSAGES or info is None or stream.bytes <= SMALL_BYTES * stream.count:
                continue
            among = any(crosses(one, other) for one in info.members for other in info.members if one < other)
            if among and not _is_sync(stream, self._job.layout):
                return True
        return False


def step_costs(evidence: Evidence, layout: InferredLayout) -> StepCosts | None:
    """The costs in the steps since the onset that all ranks with blocks have reported; None where no true graph is had.

    A graph is true when its replay takes as long as the step did.
    """
    blocks, onset_step = evidence.blocks, evidence.onset_step
    before, after = evidence.before, evidence.after
    ranks = {one.rank for one in blocks}
    names = {evidence.nodes.get(rank, "") for rank in ranks}
    offsets = evidence.offsets_among(names)
    if offsets is None and len(names) > 1:
        return None
    job = _Job(evidence.groups, layout, evidence.nodes, offsets)
    job = replace(job, layout=replace(layout, stages=_stages(ranks, job)))
    stages = job.layout.stages
    if len(set(stages.values())) > 1 and not ranks <= stages.keys():
        return None
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


def _waited_for_others_s(graph: StepGraph, healthy: Mapping[Key, float], ranks: set[int], job: _Job) -> float:
    """The growth of the collectives at a step's end that also wait for ranks without blocks, in seconds."""
    partial: set[Key] = set()
    for members in job.reducing():
        if not ranks.issuperset(members):
            partial |= {(rank, "grads-sync", 0) for rank in ranks.intersection(members)}
    if any(node.key[1] == "local" for node in graph.nodes):  # some ranks of a pipeline did not report
        partial |= {(rank, "norm-sync", 0) for rank in ranks}
    grown = {"grads-sync": 0.0, "norm-sync": 0.0}
    for place, node in enumerate(graph.nodes):
        if node.key in partial and node.key in healthy:
            kind, longer_s = node.key[1], float(graph.durations[place].mean()) - healthy[node.key]
            grown[kind] = max(grown[kind], longer_s)
    return sum(grown.values())


def _stages(ranks: set[int], job: _Job) -> dict[int, int]:
    """Pipeline stages of the ranks.

    A rank that silent ones part from its pipeline has the stage of those that reduce gradients with it.
    """
    found = {rank: stage for rank, stage in job.layout.stages.items() if rank in ranks}
    for members in job.reducing():
        known = next((found[rank] for rank in members if rank in found), None)
        if known is not None:
            found.update((rank, known) for rank in ranks.intersection(members) if rank not in found)
    return found


def _measured(graph: StepGraph, rows: Sequence[IterationSummary], ranks: set[int]) -> tuple[float, float]:
    """Mean seconds of the graph's steps as ranks measured them, and how much of that a replay does not show."""
    told = [row.duration_s for row in table_of(rows).of_ranks(ranks) if row.step in graph.steps]
    seconds = float(np.mean(told))
    return seconds, seconds - float(graph.replay(graph.durations).mean())


def _graph(
    blocks: Sequence[BlockSummary], rows: Sequence[IterationSummary], ranks: set[int], job: _Job
) -> StepGraph | None:
    """The graph of the steps of which all ranks have both blocks and an iteration; None when there is none."""
    iterations = {(one.rank, one.step): one for one in table_of(rows).of_ranks(ranks)}
    # Ranks that exchange messages are one replica of the pipeline, named by its lowest rank.
    homes = lowest_connected((one.rank, one.peer if one.peer in ranks else one.rank) for one in blocks)
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


def _operations(
    blocks: Sequence[BlockSummary],
    iterations: Mapping[int, IterationSummary],
    homes: Mapping[int, int],
    job: _Job,
) -> list[Operation]:
    """The passes, messages and gradient reductions of one step; all ranks meet at its end."""
    stages = job.layout.stages
    last = max((stages.get(rank, 0) for rank in iterations), default=0)
    found: list[Operation] = []

    def add(rank: int, kind: OperationKind, index: int, start_s: float, seconds: float) -> None:
        if job.offsets is not None:
            start_s = job.offsets.to_reference_s(job.nodes.get(rank, ""), start_s)
        step = iterations[rank].step
        found.append(Operation(rank, step, homes[rank], stages.get(rank, 0), kind, index, start_s, seconds))

    done = {rank: row.start_s for rank, row in iterations.items()}
    for one in blocks:
        if one.kind == "forward" or one.kind == "backward":
            add(one.rank, one.kind, one.index, one.start_s, one.own_s)
            done[one.rank] = max(done[one.rank], one.start_s + one.own_s)
        elif one.peer not in iterations:
            # The peer is silent: its messages are taken to come as long after the rank's own pass as they did.
            if one.kind == "recv":
                number, begin_s = one.peer * _MANY + one.index, one.start_s + one.own_s
                add(one.rank, "local", number, begin_s, one.duration_s - one.own_s)
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
    """Whether the stream is the one reduction of a rank's gradients."""
    is_dp = layout.roles.get(stream.group, ("unknown",))[0] == "dp"
    return is_dp and stream.op not in MESSAGES and stream.count == 1 and stream.bytes > SMALL_BYTES


def _is_downstream(stage: int, other: int, last: int) -> bool:
    """Whether ``other`` is the next stage; with interleaved stages the last one's next is the first."""
    if last >= 2 and {stage, other} == {0, last}:
        return stage == last
    return other > stage
