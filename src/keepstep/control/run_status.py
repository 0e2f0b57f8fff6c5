"""The content of ``RUN/status.json``: every node and rank, open incidents, and counts of what was refused."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keepstep.control.cluster import Node
from keepstep.control.controller import Controller
from keepstep.control.membership.pauses import Drained
from keepstep.core.incident import Recovery
from keepstep.traces.runs import RANKS_FILE
from keepstep.wire.messages import RankBeat

STATUS_SCHEMA = 1
_FEW_NODES = 1024  # with more nodes, the rows of ranks are in a file of their own


class NodeStatus(msgspec.Struct, frozen=True):
    """The status of a node. ``agent`` and ``launcher``: ``ok``, ``silent``, ``gone`` or ``none`` (never seen)."""

    node_rank: int
    node: str
    agent: str
    launcher: str
    heard_s_ago: float | None  # seconds since the last heartbeat
    agent_starts: int
    dropped: int  # ring records that were lost
    ranks: tuple[RankBeat, ...]  # rows in the order of ``Status.rank_columns``
    notices: tuple[str, ...] = ()  # what is not watched or not written there, and why
    # The newest steps of all its ranks that are kept there, on another node, and on storage; -1: none.
    sealed_step: int = -1
    backed_up_step: int = -1
    stored_step: int = -1
    storage_troubles: tuple[str, ...] = ()


class BackupStatus(msgspec.Struct, frozen=True):
    """The snapshots that survive the loss of a node. Steps are -1 when there is none."""

    copies: int
    step: int  # newest step that is backed up
    incarnation: int
    target: int  # the step that is being backed up
    trouble: str  # why the backup makes no progress


class Status(msgspec.Struct, frozen=True):
    """The whole content of ``RUN/status.json``."""

    schema: int
    unix_s: float
    state: str  # state of the job, a value of `JobState`
    world_size: int
    newest_step: int
    open_incidents: tuple[int, ...]
    nodes: tuple[NodeStatus, ...]
    rank_columns: tuple[str, ...]
    counters: dict[str, int]
    backups: BackupStatus | None = None
    recovery: Recovery | None = None  # the newest recovery
    incarnation: int = 0  # how often the job was re-formed
    restarts: int = 0  # how often it was re-formed because something had failed
    max_restarts: int = 0
    spares: tuple[str, ...] = ()  # nodes that wait for a place
    checks: dict[str, tuple[str, ...]] = {}  # by node: what the checks before the start found
    state_s: float = 0.0  # how long the job has been in its state
    # nodes that an operator has drained, which the scheduler is to give to nobody
    drained: tuple[Drained, ...] = ()
    most_nodes: int = 0  # nodes that the job may have; it has fewer after it has lost some
    unwatched_since_unix_s: float = 0.0  # since when an operator has it not watched; 0: it is watched
    thresholds: dict[str, str] = {}  # those that an operator has changed, by name
    # the file with the rows of ranks (a msgpack list of `RankRows`); "": they are in ``nodes``
    ranks_file: str = ""


RankRows = tuple[int, tuple[RankBeat, ...]]  # node rank, rows in the order of ``Status.rank_columns``


def status_of(
    controller: Controller, now_s: float, unix_s: float, counters: dict[str, int]
) -> tuple[Status, list[RankRows]]:
    """The status as the controller sees it at ``now_s``, and the rows of ranks where they are not in it."""
    nodes = [node for _, node in sorted(controller.cluster.nodes.items())]
    apart = len(nodes) > _FEW_NODES
    rows = [node_status(controller, node, now_s, with_ranks=not apart) for node in nodes]
    status = job_status(controller, now_s, unix_s, counters)
    status = msgspec.structs.replace(status, nodes=tuple(rows), ranks_file=RANKS_FILE if apart else "")
    return status, list(map(rank_rows, nodes)) if apart else []


def node_status(controller: Controller, node: Node, now_s: float, *, with_ranks: bool) -> NodeStatus:
    """The status of a node at ``now_s``."""
    seen, beat, kept = node.heard_s, node.beat, node.kept
    agent = "gone" if node.agent_pid else "none"
    if node.silent or node.agent is not None:
        agent = "silent" if node.silent else "ok"
    sealed, backed_up = controller.backups.steps_of(node.rank, node.ranks)
    return NodeStatus(
        node.rank,
        node.name,
        agent,
        "ok" if node.launcher is not None else "gone",
        None if seen is None else round(max(now_s - seen, 0.0), 3),
        node.agent_starts,
        beat.dropped if beat else 0,
        beat.ranks if beat and with_ranks else (),
        beat.notices if beat else (),
        max(sealed, kept.sealed),
        backed_up,
        kept.stored,
        kept.troubles,
    )


def rank_rows(node: Node) -> RankRows:
    """The newest heartbeat of every rank of a node."""
    return node.rank, node.beat.ranks if node.beat else ()


def packed_list(items: Sequence[bytes]) -> bytes:
    """The msgpack list of items that are msgpack."""
    return b"\xdd" + len(items).to_bytes(4, "big") + b"".join(items)


def job_status(controller: Controller, now_s: float, unix_s: float, counters: dict[str, int]) -> Status:
    """The status at ``now_s`` without its nodes."""
    cluster, state = controller.cluster, controller.state(now_s)
    return Status(
        STATUS_SCHEMA,
        unix_s,
        state.value,
        cluster.known_ranks,
        cluster.newest_step,
        tuple(incident.number for incident in controller.cases.incidents),
        (),
        RankBeat.__struct_fields__,
        {
            **counters,
            "ignored": controller.peers.ignored + controller.cases.ignored,
            "refused_groups": cluster.refused_groups,
        },
        _backups(controller),
        controller.cases.recovery,
        controller.reforming.incarnation,
        controller.reforming.restarts,
        controller.rendezvous.max_restarts,
        tuple(launcher.node for launcher in controller.rendezvous.spares),
        controller.admission.found,
        round(max(now_s - controller.states.since_s, 0.0), 3),
        tuple(controller.operator_orders.drained),
        controller.rendezvous.most,
        controller.running.standing.off_since_unix_s,
        dict(controller.running.standing.settings.orders),
    )


def _backups(controller: Controller) -> BackupStatus | None:
    backups = controller.backups
    if not backups.copies or len(controller.cluster.nodes) < 2:
        return None
    complete, target = backups.plan.complete, backups.plan.target
    return BackupStatus(
        backups.copies,
        complete.step if complete else -1,
        complete.incarnation if complete else 0,
        target.step if target else -1,
        backups.waits(),
    )
