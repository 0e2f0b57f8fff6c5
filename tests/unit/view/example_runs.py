"""Runs as viewers see them, made by hand: for tests of words, terminal and the like."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from keepstep.core.events import Phase
from keepstep.core.incident import Action, Culprit, Event, FailureCause, Incident, Link, SpokenLine
from keepstep.view.run_snapshot import LinkRate, NodeView, RankTable, RunSnapshot

NOW_S = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC

SLOW = Incident(
    number=1,
    kind="slow",
    onset_step=400,
    detected_step=402,
    relief_step=None,
    job_slowdown=1.76,
    culprits=(Culprit(3, None, "gpu-1", "forward and backward", 2.0, "high", "compute", "pipeline stage 1"),),
    victims=(0, 1, 2),
    evidence=("rank 3: own time 494 -> 974 ms, 100% of the job's +477 ms",),
    missing=(),
    iteration_before_s=0.623,
    iteration_after_s=1.1,
    ranks_reporting=4,
    world_size=4,
    lost_s=240.0,
    detected_unix_s=NOW_S - 717.0,
    onset_unix_s=NOW_S - 720.0,
    next_action="none yet: a remedy is applied once one pays",
)
SLOW_LINK = replace(
    SLOW,
    number=2,
    job_slowdown=1.2,
    culprits=(
        Culprit(None, Link((1, 2), ("gpu-0", "gpu-1")), "gpu-0", "transfer", 9.7, "medium", "network"),
    ),
)
HANG = Incident(
    number=3,
    kind="hang",
    onset_step=500,
    detected_step=500,
    relief_step=None,
    job_slowdown=None,
    culprits=(Culprit(1, None, "gpu-0", "backward", 0.0, "medium", "asleep in backward", "for 40 s"),),
    victims=(0, 2, 3),
    evidence=("wait-for graph has one root, rank 1",),
    missing=(),
    summary="group 2 SEND from rank 3 to rank 1 seq 83",
    stuck_s=40.0,
    world_size=4,
    detected_unix_s=NOW_S - 38.0,
    onset_unix_s=NOW_S - 40.0,
    next_action="none yet, it may go on by itself: ends rank 1",
    next_unix_s=NOW_S + 20.0,
)
CRASH = Incident(
    number=4,
    kind="crash",
    onset_step=510,
    detected_step=510,
    relief_step=None,
    job_slowdown=None,
    culprits=(Culprit(2, None, "gpu-1", "", 0.0, "high", "process died", "killed by SIGKILL"),),
    victims=(0, 1, 3),
    evidence=(),
    missing=(),
    summary="rank 2 died (killed by SIGKILL)",
    world_size=4,
    detected_unix_s=NOW_S - 5.0,
    onset_unix_s=NOW_S - 6.0,
    actions=(Action("all nodes begin again", None, "restart 1 of 3"),),
    events=(Event("deaths", NOW_S - 6.0),),
    cause=FailureCause(
        "node", "host-oom", "the node's memory was full", "high", "give the workers less, or the node more",
        first=SpokenLine("Out of memory: Killed process 12 (python)", None, "gpu-1", "kernel"),
    ),
)  # fmt: skip


def table(world: int = 4, per_node: int = 2, step: int = 512) -> RankTable:
    """Ranks that train at a pace of 623 ms, the last of them with the longest own time."""
    rank = np.arange(world, dtype=np.int32)
    own = np.full(world, 0.31, np.float32)
    own[-1] = 0.61
    return RankTable(
        rank=rank,
        node=rank // per_node,
        step=np.full(world, step, np.int64),
        phase=np.full(world, int(Phase.BACKWARD), np.int16),
        iteration_s=np.full(world, 0.623, np.float32),
        self_s=own,
        idle_s=np.zeros(world, np.float32),
        overdue_s=np.zeros(world, np.float32),
        is_alive=np.ones(world, np.bool_),
        is_watched=np.ones(world, np.bool_),
    )


def run(*incidents: Incident, state: str = "running") -> RunSnapshot:
    """A run of four ranks on two nodes, with checkpoints and links."""
    nodes = tuple(
        NodeView(node, f"gpu-{node}", sealed_step=512, backed_up_step=511 - node, stored_step=480)
        for node in range(2)
    )
    links = (LinkRate(0, 1, 1.2e9, 9.6e9, 14.0), LinkRate(1, 0, 9.5e9, 9.6e9))
    return RunSnapshot(
        "train-7b",
        NOW_S,
        state=state,
        state_s=90.0,
        world_size=4,
        most_nodes=2,
        newest_step=512,
        max_restarts=3,
        started_unix_s=NOW_S - 7200.0,
        nodes=nodes,
        ranks=table(),
        incidents=incidents,
        links=links,
        has_checkpoints=True,
    )
