"""Every metric of ``/metrics`` in one table: what is exposed, and what docs/reference/metrics.md is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MOST_RANKS_EACH = 4095  # a job with more ranks shows the worst of them only
SLOW_RATIO = 1.2  # own time over its peers': above it, a rank of a large job may be among the worst
MOST_WORST = 10  # ranks by own time, and as many by lag
MOST_INCIDENTS = 20  # open ones, the newest
MOST_NODES = 20
MOST_LINKS = 5
PERCENTILES = (0, 10, 50, 90, 99, 100)
RECOVERY_BUCKETS_S = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. All but those of the program itself carry the label ``run`` before their own ``labels``."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str  # of the value; "": a number of things
    labels: tuple[str, ...]
    meaning: str
    has_run: bool = True

    @property
    def label_names(self) -> tuple[str, ...]:
        """All labels, ``run`` first."""
        return ("run", *self.labels) if self.has_run else self.labels


@dataclass(frozen=True, slots=True)
class Section:
    """Metrics that belong together."""

    title: str
    metrics: tuple[Metric, ...]
    about: str = ""


def _gauge(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"keepstep_{name}", "gauge", unit, labels, meaning)


def _counter(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(f"keepstep_{name}", "counter", unit, labels, meaning)


_FLAG = "0 or 1"
_UNIX = "seconds since 1970"

SECTIONS = (
    Section(
        "The job",
        (
            _gauge(
                "run_info", "1", "The run; layout is how its ranks are arranged, empty if unknown.", "layout"
            ),
            _gauge("job_state", _FLAG, "1 for the state that the job is in, 0 for all others.", "state"),
            _gauge("job_state_seconds", "seconds", "How long the job has been in its state."),
            _gauge("job_watched", _FLAG, "0 while an operator has the job not watched; see `keepstep ctl`."),
            _gauge("job_start_timestamp_seconds", _UNIX, "When the job was started; absent if unknown."),
            _gauge("job_exit_code", "exit code", "Exit code of the job; absent until it has ended."),
            _gauge("job_end_info", "1", "How the job ended; absent until it has.", "category"),
            _gauge("job_ranks", "", "Ranks of the job."),
            _gauge("job_nodes_max", "", "Nodes that the job may have."),
            _gauge("job_step", "step", "Newest step that a rank has finished; -1 before the first."),
            _gauge("job_incarnation", "", "How often the job was formed anew, whatever the reason."),
            _counter("restarts_total", "", "How often the job began again because something had failed."),
            _gauge("restarts_max", "", "Restarts that the job may have in all."),
        ),
    ),
    Section(
        "Pace",
        (
            _gauge(
                "iteration_seconds",
                "seconds",
                "Duration of the last iteration, as the median over the ranks.",
            ),
            _gauge(
                "iteration_healthy_seconds",
                "seconds",
                "The same before the oldest slowdown that is open; without one, what the best quarter of the run had.",
            ),
            _gauge(
                "slowdown_ratio",
                "ratio",
                "Duration of an iteration over its healthy value; about 1 is healthy.",
            ),
            _counter(
                "lost_seconds_total",
                "seconds",
                "Time that incidents have cost the job: slow steps, time without progress, and recovery.",
                "kind",
            ),
            _counter(
                "saved_seconds_total", "seconds", "Time that slowdowns would have cost without remedies."
            ),
        ),
    ),
    Section(
        "Incidents",
        (
            _counter("incidents_total", "", "Incidents so far.", "kind"),
            _gauge(
                "incidents_open",
                "",
                "Incidents that are not over, by kind and by how sure the first culprit is.",
                "kind",
                "confidence",
            ),
            _gauge("incident_newest", "incident", "Number of the newest incident; 0 before the first."),
            _gauge(
                "incident_open",
                _FLAG,
                f"1 for an open incident (the newest {MOST_INCIDENTS}); 0 for the newest one once it is over. "
                "The label incident is empty for those that are too many to be named.",
                "incident",
                "kind",
            ),
            _gauge(
                "incident_info",
                "1",
                "What is known of the same incidents. blames is rank, link, node, path (it is not known between "
                "whom) or nobody; rank, node, link, stage and cause are of the first culprit; class is the class of "
                "the cause where processes died: storage, network, node, user or other.",
                "incident",
                "kind",
                "confidence",
                "blames",
                "rank",
                "node",
                "link",
                "stage",
                "cause",
                "class",
            ),
            _gauge("incident_slowdown_ratio", "ratio", "By how much the incident slows the job.", "incident"),
        ),
    ),
    Section(
        "Recovery",
        (
            Metric(
                "keepstep_recovery_seconds",
                "histogram",
                "seconds",
                (),
                "From the failure of a rank until every rank of its node has made a step again.",
            ),
            _gauge(
                "recovery_last_seconds", "seconds", "The same for the newest recovery; absent without one."
            ),
            _gauge(
                "recovery_last_phase_seconds", "seconds", "Parts of the newest recovery, in all.", "phase"
            ),
        ),
    ),
    Section(
        "Checkpoints",
        (
            _gauge(
                "checkpoint_step",
                "step",
                "Newest step that every node still has, by where it is kept: sealed (in the node's memory), "
                "backed_up (in another node's, too) or stored (on storage, whole); -1 is none. "
                "Absent without checkpoints.",
                "kept",
            ),
            _gauge(
                "loss_now_steps",
                "steps",
                "Steps that would be lost if the worst placed node died now; absent without checkpoints.",
            ),
            _gauge("backup_stuck", _FLAG, "1 while the backup on other nodes makes no progress."),
            _gauge(
                "storage_troubled_nodes", "", "Nodes whose checkpoints do not get to storage as they should."
            ),
        ),
    ),
    Section(
        "Nodes",
        (
            _gauge(
                "nodes",
                "",
                "Nodes by how their agent or launcher (part) is: ok, silent, gone or none (never seen).",
                "part",
                "state",
            ),
            _gauge("spares", "", "Nodes that wait for a place."),
            _gauge("nodes_noticed", "", "Nodes on which something is not watched or not written."),
            _gauge(
                "node_silent_seconds",
                "seconds",
                f"Time since a node was heard, for up to {MOST_NODES} nodes whose agent or launcher is silent or gone.",
                "node",
            ),
        ),
    ),
    Section(
        "Links",
        (
            _gauge(
                "links_worst_ratio",
                "ratio",
                "Rate of the slowest link over its usual rate; absent where no usual rate is known.",
            ),
            _gauge("links_retransmits_per_second", "per second", "Segments sent again, over all links."),
            _gauge(
                "link_rate_ratio",
                "ratio",
                f"Rate over the usual rate, for up to {MOST_LINKS} links that are below 0.8.",
                "source",
                "target",
            ),
        ),
    ),
    Section(
        "All ranks",
        (
            _gauge(
                "ranks",
                "",
                "Ranks by condition: heard (at all), dead, unwatched (nothing is seen of them) or overdue (they "
                "wait for others longer than usual).",
                "condition",
            ),
            _gauge(
                "ranks_own_seconds", "seconds", "Own time in the last iteration, over ranks.", "percentile"
            ),
            _gauge(
                "ranks_iteration_seconds",
                "seconds",
                "Duration of the last iteration, over ranks.",
                "percentile",
            ),
            _gauge(
                "ranks_idle_seconds", "seconds", "Time since the last progress, over ranks.", "percentile"
            ),
            _gauge("ranks_lag_steps", "steps", "Steps behind the newest step, over ranks.", "percentile"),
        ),
    ),
    Section(
        "Single ranks",
        (
            _gauge(
                "rank_own_ratio",
                "ratio",
                "Own time over the median of its peers: the ranks of its pipeline stage, or all ranks.",
                "rank",
                "node",
            ),
            _gauge("rank_own_seconds", "seconds", "Own time in the last iteration.", "rank", "node"),
            _gauge("rank_lag_steps", "steps", "Steps behind the newest step.", "rank", "node"),
            _gauge(
                "rank_info",
                "1",
                "Where the rank is: gpu is its place among the ranks of its node, which is its GPU's number "
                "unless the script picks another one.",
                "rank",
                "node",
                "gpu",
            ),
        ),
        f"Of every rank of a job with up to {MOST_RANKS_EACH:,} ranks. Of a larger one: culprits of open incidents, "
        f"the {MOST_WORST} with the longest own time over their peers' if that is {SLOW_RATIO} times it or more, and "
        f"the {MOST_WORST} that are furthest behind if that is 2 steps or more.",
    ),
    Section(
        "keepstep itself",
        (
            Metric("keepstep_build_info", "gauge", "1", ("version",), "Version of keepstep.", has_run=False),
            _gauge("snapshot_timestamp_seconds", _UNIX, "When the job was as the metrics tell."),
            _gauge("snapshot_age_seconds", "seconds", "How old that is; 0 while news comes."),
            _gauge("snapshot_troubles", "", "Things of the run that could not be read."),
            _gauge(
                "unnamed_series", "", "Series that were left out or lost labels, to keep them few, so far."
            ),
            _gauge("metrics_collect_seconds", "seconds", "What it took to collect these metrics."),
        ),
    ),
)

METRICS = {metric.name: metric for section in SECTIONS for metric in section.metrics}
