"""Snapshots by hand: a job of any size, and one run in the moments that an operator cares about."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keepstep.core.incident import Action, Culprit, Event, FailureCause, Incident, Link, Recovery
from keepstep.core.layout import ParallelLayout
from keepstep.view.run_snapshot import LinkRate, NodeView, RankTable, RunEnd, RunSnapshot

HOSTILE = '<script>alert("x")</script>\n\x1b[31m{run="other"} \\'
BEGAN_S = 1_700_000_000.0


def rank_table(world: int, per_node: int = 8, *, step: int = 100, seed: int = 1) -> RankTable:
    """Healthy ranks, all within a step of each other."""
    random = np.random.default_rng(seed)
    rank = np.arange(world, dtype=np.int32)
    return RankTable(
        rank,
        (rank // per_node).astype(np.int32),
        (step - (random.random(world) < 0.3)).astype(np.int64),
        np.ones(world, np.int16),
        random.normal(1.0, 0.01, world).astype(np.float32),
        random.normal(0.4, 0.01, world).astype(np.float32),
        random.random(world).astype(np.float32),
        np.zeros(world, np.float32),
        np.ones(world, np.bool_),
        np.ones(world, np.bool_),
    )


def incident(number: int, kind: str = "slow", **fields: object) -> Incident:
    """An incident with nobody to blame."""
    base = Incident(number, kind, 40, 43, None, None, (), (), (), (), detected_unix_s=BEGAN_S + number)  # type: ignore[arg-type]
    return replace(base, **fields)  # type: ignore[arg-type]


def snapshot(world: int = 16, per_node: int = 8, *, step: int = 100, name: str = "demo") -> RunSnapshot:
    """A healthy job that trains, with checkpoints."""
    nodes = tuple(
        NodeView(
            at,
            f"gpu-{at:05d}",
            heard_s_ago=0.5,
            sealed_step=step,
            backed_up_step=step - 1,
            stored_step=step - 50,
        )
        for at in range(-(-world // per_node))
    )
    links = tuple(LinkRate(at, (at + 1) % len(nodes), 9e9, 1e10, 0.5) for at in range(min(len(nodes), 1024)))
    return RunSnapshot(
        name,
        BEGAN_S + step,
        state="running",
        state_s=float(step),
        world_size=world,
        most_nodes=len(nodes),
        newest_step=step,
        max_restarts=3,
        started_unix_s=BEGAN_S,
        layout=ParallelLayout.declared(f"tp2-pp2-dp{world // 4}"),
        nodes=nodes,
        spares=("gpu-spare",),
        ranks=rank_table(world, per_node, step=step),
        links=links,
        has_checkpoints=True,
    )


def with_slow_rank(job: RunSnapshot, rank: int = 3, number: int = 1) -> RunSnapshot:
    """The job with a rank whose own time has doubled, and the verdict about it."""
    assert job.ranks is not None
    own_s = job.ranks.self_s.copy()
    own_s[rank] *= 2
    ranks = replace(job.ranks, self_s=own_s, iteration_s=job.ranks.iteration_s + np.float32(0.8))
    node = job.nodes[int(ranks.node[rank])].name
    verdict = incident(
        number,
        job_slowdown=1.8,
        culprits=(Culprit(rank, None, node, "forward", 2.0, "high", "compute"),),
        iteration_before_s=1.0,
        iteration_after_s=1.8,
        lost_s=12.0,
        saved_s=3.0,
        actions=(Action("S2"),),
        events=(Event("verdict", job.unix_s),),
    )
    slow_link = LinkRate(0, len(job.nodes) - 1, 1e9, 1e10, 40.0)
    return replace(job, ranks=ranks, incidents=(*job.incidents, verdict), links=(slow_link, *job.links[1:]))


def with_hang(job: RunSnapshot, number: int = 2) -> RunSnapshot:
    """The job with ranks that wait for one another over a link, and a node that is not heard."""
    assert job.ranks is not None
    waits = np.full(len(job.ranks), 90, np.float32)
    verdict = incident(
        number,
        "hang",
        culprits=(Culprit(None, Link((0, 8), ("gpu-00000", "gpu-00001")), "", "", 0.0, "medium", "network"),),
        stuck_s=90.0,
        next_action="restart",
    )
    nodes = (
        *job.nodes[:-1],
        replace(job.nodes[-1], agent="silent", heard_s_ago=75.0, notices=("not watched",)),
    )
    watched = job.ranks.is_watched.copy()
    watched[-1] = False
    ranks = replace(job.ranks, idle_s=waits, overdue_s=waits, is_watched=watched)
    return replace(
        job, nodes=nodes, ranks=ranks, incidents=(*job.incidents, verdict), backup_trouble="no news"
    )


def with_crash(job: RunSnapshot, number: int = 3) -> RunSnapshot:
    """The job while it recovers from a node that broke."""
    cause = FailureCause("node", "gpu", "GPU fell off the bus", "high")
    crash = incident(
        number,
        "crash",
        culprits=(Culprit(None, None, job.nodes[-1].name, "", 0.0, "high"),),
        cause=cause,
        recovery=Recovery(
            1, 5, "was killed", 2.5, (("ended", 0.5), ("placed", 1.5), ("first step", 0.5)), 4, 8
        ),
    )
    closed = tuple(replace(one, status="relieved", relief_step=90) for one in job.incidents)
    return replace(
        job, state="recovering", state_s=400.0, restarts=1, incarnation=1, incidents=(*closed, crash)
    )


def ended(job: RunSnapshot, exit_code: int = 1) -> RunSnapshot:
    """The job after its end."""
    closed = tuple(replace(one, status="ended") for one in job.incidents)
    return replace(job, state="ended", end=RunEnd(exit_code, "crash", "rank 5 was killed"), incidents=closed)


def story(name: str = "demo") -> list[RunSnapshot]:
    """A run from healthy steps over a slow rank, a hang and a crash to its end, in which all metrics have a value."""
    healthy = [snapshot(step=step, name=name) for step in (100, 101, 102)]
    slow = with_slow_rank(snapshot(step=110, name=name))
    hung = with_hang(with_slow_rank(snapshot(step=111, name=name)))
    lost = replace(hung, incidents=tuple(replace(one, lost_s=30.0) for one in hung.incidents))
    return [
        *healthy,
        slow,
        slow,
        hung,
        lost,
        lost,
        with_crash(lost),
        with_crash(lost),
        ended(with_crash(lost)),
    ]
