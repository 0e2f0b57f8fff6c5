"""Slowness from the first steps on: there is no healthy time to compare with, so that peers are the measure.

Detectors on the agents learn a rank's pace from its own steps, two dozen at least, and take for usual what they learn.
Until then the ranks' own times in the heartbeats are compared with each other. One that stands out is no verdict yet:
it is profiled, and named where its peers of the same pipeline stage were faster for steps on end (GREYHOUND §4.3).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from statistics import median

from keepstep.control.cluster import Cluster
from keepstep.control.incidents.locators import Locators
from keepstep.control.incidents.slow_evidence import LARGE_WORLD
from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.finding import Finding
from keepstep.core.incident import Diagnosis
from keepstep.core.summary import IterationSummary
from keepstep.wire.messages import RankBeat

FIRST_STEPS = 3  # steps of an incarnation that are not compared: memory is allocated, connections are made
_COMPARED_FROM = 5  # the step from which on ranks are compared
LEAST_STEPS = 3  # slow steps on end that a verdict needs
# A rank that only its GPU's times show to be slow needs more of them, as uneven work looks alike.
MILD_STEPS = 4
_LAST_STEP = 30  # steps after which a rank's own history is the measure
_EVERY_STEPS = 2
_MOST_LOOKS = 8  # profiles that are asked for in one incarnation
_MOST_MILD = 3  # profiles for ranks that are not slow enough to be named by the host's times
# Least own time of a slow rank over that of its peers: by a host's times, and by those of a GPU that did not wait for
# its host.
_RATIO, _RATIO_ON_DEVICE = 1.4, 1.2
# Least part of an iteration that a slow rank costs, by a host's times and by such a GPU's.
_SHARE, _SHARE_ON_DEVICE = 0.2, 0.15
# A host that is ahead of its GPU by this part of the rank's own time does not keep it waiting.
_WELL_AHEAD = 0.5


class EarlySlowness:
    """Looks at what heartbeats tell of the first steps of an incarnation."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.begin_again()

    def begin_again(self) -> None:
        """Forget the last incarnation."""
        self._first: int | None = None
        self._step = -1
        self._looks = self._mild = 0
        self._stages: Mapping[int, int] = {}
        self._mildly: tuple[int, int] | None = None  # the rank that stands out mildly, and since which step

    def look(self, now_s: float) -> Finding | None:
        """A rank that seems to be slow, once in a few steps; to be called at every tick."""
        nodes = self._cluster.nodes.values()
        node = next(iter(nodes), None)
        ranks = node.beat.ranks if node is not None and node.beat is not None else ()
        step = ranks[0].step if ranks else -1
        if step < 0 or self._looks >= _MOST_LOOKS:
            return None
        if self._first is None:
            self._first = step
        early = step <= self._first + _LAST_STEP
        if not early or step < max(self._first + _COMPARED_FROM, self._step + _EVERY_STEPS):
            return None
        beats = [(one, node) for node in nodes if node.beat is not None for one in node.beat.ranks]
        beats = [(one, node) for one, node in beats if one.iteration_s > 0]
        if len(beats) < max(self._cluster.known_ranks, 2):
            return None
        self._step = step
        own = {one.rank: one for one, _ in beats}
        found = [one for peers in self._peers(own.keys()) if (one := _standing_out(own, peers)) is not None]
        if not found:
            self._mildly = None
            return None
        ratio, worst, more_s = max(found, key=lambda one: one[0])
        node = next(node for one, node in beats if one is worst)
        mild = ratio < _RATIO
        if mild and (self._mild >= _MOST_MILD or step < self._mild_since(worst.rank, step) + MILD_STEPS - 1):
            return None
        self._looks, self._mild = self._looks + 1, self._mild + mild
        return Finding(
            "slow",
            worst.rank,
            node.name,
            now_s,
            worst.step,
            onset_step=worst.step,
            before_s=worst.iteration_s - more_s,
            after_s=worst.iteration_s,
        )

    def _mild_since(self, rank: int, step: int) -> int:
        """Since when the rank that stands out mildly has done so: the first steps are taken to have been alike."""
        if self._mildly is None or self._mildly[0] != rank:
            assert self._first is not None
            is_first = step <= self._first + _COMPARED_FROM + _EVERY_STEPS
            self._mildly = rank, self._first + FIRST_STEPS if is_first else step
        return self._mildly[1]

    def learn_stages(self, stages: Mapping[int, int]) -> None:
        """Compare ranks within their pipeline stages from now on, if there are any. ``stages``: by rank."""
        self._stages = stages or self._stages

    def _peers(self, ranks: Collection[int]) -> list[Collection[int]]:
        """Ranks that may have the same to do: those of a pipeline stage.

        While stages are not known, all, and of a job that is not large each process group of three or more: a stage's
        replicas have one.
        """
        if self._stages:
            by_stage: dict[int, list[int]] = {}
            for rank in ranks:
                by_stage.setdefault(self._stages.get(rank, -1), []).append(rank)
            return list(by_stage.values())
        if len(ranks) > LARGE_WORLD:
            return [ranks]
        groups = [group.members for group in self._cluster.groups.values() if not group.is_communicator]
        return [ranks, *(members for members in groups if 3 <= len(members) < len(ranks))]


def _standing_out(
    own: Mapping[int, RankBeat], peers: Collection[int]
) -> tuple[float, RankBeat, float] | None:
    """The slowest of these ranks if it stands out: by what ratio, its heartbeat, and by how many seconds."""
    beats = [own[rank] for rank in peers if rank in own]
    if len(beats) < 2:
        return None
    usual_s = sorted(one.self_s for one in beats)[(len(beats) - 1) // 2]
    worst = max(beats, key=lambda one: one.self_s)
    more_s = worst.self_s - usual_s
    if worst.self_s < _RATIO_ON_DEVICE * usual_s or more_s < _SHARE_ON_DEVICE * worst.iteration_s:
        return None
    return worst.self_s / max(usual_s, 1e-9), worst, more_s


def least_ratio(rows: Sequence[IterationSummary], rank: int) -> float:
    """How much slower than its peers a rank has to be that is named by these iterations.

    The times of a GPU hold whatever keeps it waiting, its host's delays, too: they are steadier than a busy host's only
    where that host was well ahead of it.
    """
    from keepstep.core.iteration_table import table_of

    table = table_of(rows)
    its = table.where(table.column("rank") == rank)
    ahead_s, own_s = its.column("ahead_s"), its.column("self_s")
    is_ahead = len(its) > 0 and ahead_s.min() >= 0 and median(ahead_s) >= _WELL_AHEAD * median(own_s)
    return _RATIO_ON_DEVICE if is_ahead else _RATIO


def slow_since(rows: Sequence[IterationSummary], rank: int, stages: Mapping[int, int]) -> int | None:
    """The step from which on a rank was slower than its peers in every step; None: not for so long as a verdict needs.

    ``rows``: the iterations of an incarnation from its first one on. ``stages``: pipeline stages by rank, as only ranks
    of the same stage are peers.
    """
    from keepstep.core.iteration_table import between

    if stages and rank not in stages:
        return None  # its peers are not known
    stage_of = stages.get
    stage = stage_of(rank, -1)
    first = min((row.step for row in rows), default=0)
    by_step: dict[int, list[IterationSummary]] = {}
    for row in rows:
        if stage_of(row.rank, -1) == stage:
            by_step.setdefault(row.step, []).append(row)
    most = max(map(len, by_step.values()), default=0)
    told: list[tuple[IterationSummary, float]] = []
    for _, its in sorted(by_step.items(), reverse=True):
        own = [row for row in its if row.rank == rank]
        if own and len(its) == most:
            told.append((own[0], sorted(row.self_s for row in its)[(most - 1) // 2]))
    on_device = least_ratio(between(rows, first + FIRST_STEPS, 1 << 31), rank) < _RATIO
    since = _since(told, _RATIO, LEAST_STEPS, _SHARE)
    return (
        since
        if since is not None or not on_device
        else _since(told, _RATIO_ON_DEVICE, MILD_STEPS, _SHARE_ON_DEVICE)
    )


def _since(
    told: Sequence[tuple[IterationSummary, float]], ratio: float, least_steps: int, share: float
) -> int | None:
    """The first of the newest steps that all took the rank ``ratio`` times as long as its peers; None: few or cheap.

    ``told``: its iterations, and what they took its peers, the newest first.
    """
    slow = list(takewhile(lambda one: one[0].self_s >= ratio * one[1], told))
    if len(slow) < least_steps:
        return None
    cost_s = median(row.self_s - usual_s for row, usual_s in slow)
    return slow[-1][0].step if cost_s >= share * median(row.duration_s for row, _ in slow) else None


def known_stages(locators: Locators, evidence: Evidence) -> Mapping[int, int] | None:
    """Pipeline stages by rank, empty without a pipeline; None: ranks have unlike work, as far as is known.

    ``evidence``: the iterations after the first ones. Of messages that ranks send each other in an order that is not
    known, or where no iteration has its streams, nothing can be said.
    """
    from keepstep.core.iteration_table import table_of

    with suppress(Exception):  # what agents send may be anything
        _, streams = table_of(evidence.after).newest_steps().flat()
        messages = (streams["op"] == Op.SEND) | (streams["op"] == Op.RECV)
        stages = locators.stages(evidence)
        if stages or (len(streams) and not messages.any()):
            return stages or {}
    return None


def only_sure(diagnosis: Diagnosis, rows: Sequence[IterationSummary], stages: Mapping[int, int]) -> Diagnosis:
    """A diagnosis against peers with those ranks alone that ``rows`` show to be slow for long enough."""
    named = [(one, one.rank) for one in diagnosis.culprits if one.rank is not None]
    sure = tuple(one for one, rank in named if slow_since(rows, rank, stages) is not None)
    return replace(diagnosis, culprits=sure)
