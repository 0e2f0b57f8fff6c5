"""``/metrics``: a run as Prometheus' text. Few series, however many ranks, incidents or moves a job has."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import metadata
from operator import attrgetter

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from keepstep.control.membership.transitions import JobState
from keepstep.core.incident import NETWORK, Culprit, Incident
from keepstep.view.metric_rows import MetricRows, label_value
from keepstep.view.metric_table import (
    MOST_INCIDENTS,
    MOST_LINKS,
    MOST_NODES,
    MOST_RANKS_EACH,
    RECOVERY_BUCKETS_S,
)
from keepstep.view.named_series import NamedSeries
from keepstep.view.rank_metrics import pace_s, put_ranks, single_ranks, usual_pace_s
from keepstep.view.run_snapshot import NodeView, RunSnapshot
from keepstep.view.samples import SampleStore

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STATES = (*(state.value.replace(" ", "_") for state in JobState), "ended", "silent", "unknown")
KINDS = ("slow", "hang", "crash", "desync", "corrupt")
CONFIDENCES = ("high", "medium", "low")
NODE_STATES = ("ok", "silent", "gone", "none")
_SLOW_LINK = 0.8  # of the usual rate
_MOST_PHASES = 16


def exposition(
    snapshot: RunSnapshot, samples: SampleStore | None = None, memory: SeriesMemory | None = None
) -> bytes:
    """The run as Prometheus' text format 0.0.4, of the type `CONTENT_TYPE`.

    ``memory``, one for each run and kept between scrapes, bounds how many series a job makes over time and keeps
    counters from falling; without it only this one answer is bounded.
    """
    memory = SeriesMemory() if memory is None else memory
    began_s = time.perf_counter()
    single = single_ranks(snapshot, memory.ranks, memory.clock())
    usual_s = math.nan if samples is None else usual_pace_s(samples)
    return generate_latest(_Collector(snapshot, usual_s, memory, began_s)) + single


class SeriesMemory:
    """What is remembered of a run's series from scrape to scrape."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.ranks = NamedSeries(2 * (MOST_RANKS_EACH + 1))
        self.incidents = NamedSeries(500)
        self.details = NamedSeries(500)
        self.nodes = NamedSeries(500)
        self.links = NamedSeries(500)
        self._highest: dict[tuple[str, str], float] = {}

    @property
    def refused(self) -> int:
        """How often a series was not let in."""
        named = (self.ranks, self.incidents, self.details, self.nodes, self.links)
        return sum(one.refused for one in named)

    def risen(self, name: str, label: str, value: float) -> float:
        """The value, or the highest so far: an estimate that is corrected downwards is no reset of a counter."""
        self._highest[name, label] = value = max(value, self._highest.get((name, label), value))
        return value


@cache
def _version() -> str:
    return metadata.version("keepstep")


class _Collector(Collector):
    """All but the series of single ranks."""

    def __init__(self, snapshot: RunSnapshot, usual_s: float, memory: SeriesMemory, began_s: float) -> None:
        self._snapshot, self._usual_s, self._memory, self._began_s = snapshot, usual_s, memory, began_s

    def collect(self) -> Iterator[Metric]:
        snapshot, memory = self._snapshot, self._memory
        rows = MetricRows(snapshot.name)
        still_open = snapshot.open_incidents
        _put_job(rows, snapshot, memory)
        _put_pace(rows, snapshot, still_open, self._usual_s)
        _put_incidents(rows, snapshot.incidents, still_open, memory)
        _put_recoveries(rows, snapshot)
        _put_checkpoints(rows, snapshot)
        _put_nodes(rows, snapshot, memory)
        _put_links(rows, snapshot, memory)
        put_ranks(rows, snapshot.ranks)
        rows.put("keepstep_build_info", 1, _version())
        rows.put("keepstep_snapshot_timestamp_seconds", snapshot.unix_s)
        rows.put("keepstep_snapshot_age_seconds", snapshot.age_s)
        rows.put("keepstep_snapshot_troubles", len(snapshot.troubles))
        rows.put("keepstep_unnamed_series", memory.refused)
        rows.put("keepstep_metrics_collect_seconds", time.perf_counter() - self._began_s)
        yield from rows.families()


def _put_job(rows: MetricRows, snapshot: RunSnapshot, memory: SeriesMemory) -> None:
    rows.put("keepstep_run_info", 1, "" if snapshot.layout is None else str(snapshot.layout))
    state = snapshot.state.replace(" ", "_")
    state = state if state in STATES else "unknown"
    for one in STATES:
        rows.put("keepstep_job_state", one == state, one)
    rows.put("keepstep_job_state_seconds", snapshot.state_s)
    rows.put("keepstep_job_watched", not snapshot.unwatched_since_unix_s)
    if snapshot.started_unix_s > 0:
        rows.put("keepstep_job_start_timestamp_seconds", snapshot.started_unix_s)
    if snapshot.end is not None:
        rows.put("keepstep_job_exit_code", snapshot.end.exit_code)
        rows.put("keepstep_job_end_info", 1, snapshot.end.category)
    rows.put("keepstep_job_ranks", snapshot.world_size)
    rows.put("keepstep_job_nodes_max", snapshot.most_nodes)
    rows.put("keepstep_job_step", snapshot.newest_step)
    rows.put("keepstep_job_incarnation", snapshot.incarnation)
    rows.put("keepstep_restarts_total", memory.risen("restarts", "", snapshot.restarts))
    rows.put("keepstep_restarts_max", snapshot.max_restarts)


def _put_pace(
    rows: MetricRows, snapshot: RunSnapshot, still_open: Sequence[Incident], usual_s: float
) -> None:
    now_s = pace_s(snapshot.ranks)
    before_s = (one.iteration_before_s for one in still_open if one.kind == "slow" and one.iteration_before_s)
    healthy_s = next(before_s, now_s if math.isnan(usual_s) else usual_s)
    rows.put("keepstep_iteration_seconds", now_s)
    rows.put("keepstep_iteration_healthy_seconds", healthy_s)
    rows.put("keepstep_slowdown_ratio", now_s / healthy_s)


def lost_s(incident: Incident) -> float:
    """Seconds that the incident has cost the job: slow steps, time without progress, recovery."""
    recovery_s = 0.0 if incident.recovery is None else incident.recovery.seconds
    stuck_s = incident.stuck_s or 0.0 if incident.lost_s is None else 0.0
    return (incident.lost_s or 0.0) + stuck_s + recovery_s


def _put_incidents(
    rows: MetricRows, incidents: Sequence[Incident], still_open: Sequence[Incident], memory: SeriesMemory
) -> None:
    counts = Counter(map(attrgetter("kind"), incidents))
    lost = dict.fromkeys(KINDS, 0.0)
    for incident in incidents:
        lost[incident.kind] += lost_s(incident)
    for kind in KINDS:
        rows.put("keepstep_lost_seconds_total", memory.risen("lost", kind, lost[kind]), kind)
        rows.put("keepstep_incidents_total", memory.risen("incidents", kind, counts[kind]), kind)
    saved_s = sum(map(attrgetter("saved_s"), incidents))
    rows.put("keepstep_saved_seconds_total", memory.risen("saved", "", saved_s))
    sure = Counter((one.kind, _first(one).confidence) for one in still_open)
    for kind in KINDS:
        for confidence in CONFIDENCES:
            rows.put("keepstep_incidents_open", sure[kind, confidence], kind, confidence)
    newest = incidents[-1] if incidents else None
    rows.put("keepstep_incident_newest", newest.number if newest else 0)
    shown = list(still_open[-MOST_INCIDENTS:])
    if newest is not None and newest.number not in {one.number for one in shown}:
        shown.append(newest)
    unnamed: set[str] = set()
    for incident in shown:
        number, is_open = f"{incident.number:04d}", incident.status == "open"
        if memory.incidents.admits((number,), memory.clock()):
            rows.put("keepstep_incident_open", is_open, number, incident.kind)
            _put_details(rows, incident, number, memory)
        elif is_open and incident.kind not in unnamed:
            unnamed.add(incident.kind)
            rows.put("keepstep_incident_open", 1, "", incident.kind)


def _first(incident: Incident) -> Culprit:
    return incident.culprits[0] if incident.culprits else Culprit()


def _put_details(rows: MetricRows, incident: Incident, number: str, memory: SeriesMemory) -> None:
    culprit = _first(incident)
    rank = "" if culprit.rank is None else str(culprit.rank)
    link = "" if culprit.link is None else " - ".join(label_value(node) for node in culprit.link.nodes)
    details = (
        number,
        incident.kind,
        culprit.confidence,
        _blames(culprit),
        rank,
        culprit.node,
        link,
        culprit.stage,
        culprit.cause or (incident.cause.title if incident.cause else ""),
        incident.cause.cause_class if incident.cause else "",
    )
    if memory.details.admits(details, memory.clock()):
        rows.put("keepstep_incident_info", 1, *details)
    if incident.job_slowdown is not None:
        rows.put("keepstep_incident_slowdown_ratio", incident.job_slowdown, number)


def _blames(culprit: Culprit) -> str:
    if culprit.rank is not None:
        return "rank"
    if culprit.link is not None:
        return "link"
    if culprit.node:
        return "node"
    return "path" if culprit.cause == NETWORK else "nobody"


def _put_recoveries(rows: MetricRows, snapshot: RunSnapshot) -> None:
    recoveries = [one.recovery for one in snapshot.incidents if one.recovery is not None]
    seconds = [one.seconds for one in recoveries]
    rows.put_histogram("keepstep_recovery_seconds", RECOVERY_BUCKETS_S, seconds)
    if recoveries:
        newest = max(recoveries, key=lambda one: one.incarnation)
        rows.put("keepstep_recovery_last_seconds", newest.seconds)
        phases: dict[str, float] = {}
        for phase, took_s in newest.phases[:_MOST_PHASES]:
            phases[label_value(phase)] = phases.get(label_value(phase), 0.0) + took_s
        for phase, took_s in phases.items():
            rows.put("keepstep_recovery_last_phase_seconds", took_s, phase)


def _put_checkpoints(rows: MetricRows, snapshot: RunSnapshot) -> None:
    loss = snapshot.loss_now_steps
    if loss is not None:
        rows.put("keepstep_loss_now_steps", loss)
    if not snapshot.has_checkpoints:
        return
    for kept in ("sealed", "backed_up", "stored"):
        step = min(map(attrgetter(f"{kept}_step"), snapshot.nodes), default=-1)
        rows.put("keepstep_checkpoint_step", step, kept)
    rows.put("keepstep_backup_stuck", bool(snapshot.backup_trouble))
    rows.put("keepstep_storage_troubled_nodes", _how_many(snapshot.nodes, "storage_troubles"))


def _how_many(nodes: Sequence[NodeView], has: str) -> int:
    return sum(map(bool, map(attrgetter(has), nodes)))


def _put_nodes(rows: MetricRows, snapshot: RunSnapshot, memory: SeriesMemory) -> None:
    nodes = snapshot.nodes
    agents = Counter(map(attrgetter("agent"), nodes))
    launchers = Counter(map(attrgetter("launcher"), nodes))
    for state in NODE_STATES:
        rows.put("keepstep_nodes", agents[state], "agent", state)
        rows.put("keepstep_nodes", launchers[state], "launcher", state)
    rows.put("keepstep_spares", len(snapshot.spares))
    rows.put("keepstep_nodes_noticed", _how_many(nodes, "notices"))
    if snapshot.end is None and not agents["ok"] == launchers["ok"] == len(nodes):
        quiet = [node for node in nodes if not node.agent == node.launcher == "ok" and _is_quiet(node)]
        quiet.sort(key=lambda node: node.heard_s_ago or 0.0, reverse=True)
        told: set[str] = set()
        for node in quiet[:MOST_NODES]:
            name = label_value(node.name)
            if name not in told and memory.nodes.admits((name,), memory.clock()):
                rows.put("keepstep_node_silent_seconds", node.heard_s_ago or 0.0, name)
            told.add(name)


def _is_quiet(node: NodeView) -> bool:
    return node.heard_s_ago is not None and {node.agent, node.launcher} & {"silent", "gone"} != set()


def _put_links(rows: MetricRows, snapshot: RunSnapshot, memory: SeriesMemory) -> None:
    if not snapshot.links:
        return
    rows.put("keepstep_links_retransmits_per_second", sum(link.retransmits_per_s for link in snapshot.links))
    rated = [
        (link.bytes_per_s / link.usual_bytes_per_s, link)
        for link in snapshot.links
        if link.usual_bytes_per_s > 0
    ]
    if not rated:
        return
    rows.put("keepstep_links_worst_ratio", min(ratio for ratio, _ in rated))
    slow = sorted((one for one in rated if one[0] < _SLOW_LINK), key=lambda one: one[0])[:MOST_LINKS]
    names = snapshot.node_names(end for _, link in slow for end in (link.source, link.target))
    told: set[tuple[str, str]] = set()
    for ratio, link in slow:
        ends = names.get(link.source, str(link.source)), names.get(link.target, str(link.target))
        ends = label_value(ends[0]), label_value(ends[1])
        if ends not in told and memory.links.admits(ends, memory.clock()):
            rows.put("keepstep_link_rate_ratio", ratio, *ends)
        told.add(ends)
