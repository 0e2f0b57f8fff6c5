"""What is done about a bad node: a condition and an Event, and with ``nodeRemedy: auto`` a taint, too.

Faults are proven by the job's controller as for other schedulers (`launch.schedulers.node_faults`); a lost node only
where its kubelet is not heard either. Only what is ours is ever undone, and only once somebody has removed the
condition: the operator never takes a node for mended by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from keepstep.core.log_lines import one_line
from keepstep.kubernetes.actions import Action, Mark, Object, SetTaints, Tell, Unmark
from keepstep.kubernetes.objects import GROUP, Fault, FaultKind, Node, Pod, Remedy, Taint, TrainingJob
from keepstep.launch.schedulers.node_faults import DrainBudget
from keepstep.wire.messages import FaultyNode

CONDITIONS: Mapping[FaultKind, str] = {
    "slow": "KeepstepFailSlow",
    "hardware": "KeepstepHardware",
    "lost": "KeepstepLost",
}
TAINTS: Mapping[FaultKind, str] = {
    "slow": f"{GROUP}/fail-slow",
    "hardware": f"{GROUP}/hardware",
    "lost": f"{GROUP}/lost",
}
EFFECT = "NoSchedule"
"""Of our taints: pods of other jobs may go on, as under a drain of Slurm's."""
CONTROL_PLANE = ("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master")
"""A node that has one of these labels gets no taint."""
VALUE = "keepstep-operator"
"""The value of our taints: one with another value is somebody else's."""
REASONS: Mapping[FaultKind, str] = {"slow": "FailSlow", "hardware": "Hardware", "lost": "Lost"}
_AHEAD_S = 3600.0
"""What is told to be of later than this is of no clock."""
LOST_S = 600.0
"""A node was lost no longer ago than this: later, that its kubelet is not heard proves nothing about it."""
ORDER: Mapping[Remedy, int] = {"off": 0, "advise": 1, "auto": 2}
"""The least first."""
_MOST_FAULTS = 200
_MOST_TEXT = 500


@dataclass(frozen=True, slots=True)
class Cluster:
    """All nodes by name; the job's, now or earlier; most that may be done; Unix time now.

    ``tainted``: nodes that are to get our taint, by the orders of any job. ``shared``: how many nodes a job may taint
    together with others; None where it shares with none.
    """

    nodes: Mapping[str, Node]
    used: Collection[str]
    most: Remedy
    unix_s: float
    tainted: set[str]
    shared: DrainBudget | None = None


def remedy_of(job: TrainingJob, most: Remedy) -> Remedy:
    """What is to be done about bad nodes of a job: what it wants, and no more than the operator may."""
    return min(job.spec.node_remedy, most, key=ORDER.__getitem__)


def believed(
    job: TrainingJob, told: Sequence[FaultyNode], pods: Sequence[Pod], unix_s: float
) -> list[FaultyNode]:
    """What a job tells of nodes, without what is of an earlier run in its folder, and what is lost no more.

    Nothing where the job's template, or whoever made one of its pods, names a node: a user could have any node called
    bad.
    """
    pod: Object = job.spec.template.get("spec") or {}
    if pod.get("nodeName") or any(one.chose_its_node for one in pods):
        return []
    return [
        one
        for one in told
        if job.metadata.created_unix_s <= one.unix_s < unix_s + _AHEAD_S
        and (one.kind != "lost" or _is_lost_still(one, pods, unix_s))
    ]


def _is_lost_still(fault: FaultyNode, pods: Sequence[Pod], unix_s: float) -> bool:
    """Whether a node was lost a short while ago, and no pod was made since that has come to it."""
    later = (one for one in pods if one.metadata.created_unix_s >= fault.unix_s)
    return unix_s - fault.unix_s < LOST_S and all(one.spec.node_name != fault.node for one in later)


def judged(job: TrainingJob, told: Sequence[FaultyNode], cluster: Cluster) -> list[Fault]:
    """The job's faults: those that it had, as far as they have come, and what is ordered about new ones."""
    faults = [_moved_on(one, cluster.nodes.get(one.node)) for one in job.status.faults]
    remedy = remedy_of(job, cluster.most)
    if remedy == "off":
        return faults
    budget = DrainBudget(job.spec.pods)
    for before in sorted(one.ordered for one in faults if one.taint):
        budget.take(before)
    known: dict[tuple[str, str], int] = {}
    for one in faults:
        known[one.node, one.kind] = max(one.detected, known.get((one.node, one.kind), 0))
    for new in _proven(told, budget.most, cluster):
        if int(new.unix_s) <= known.get((new.node, new.kind), -1):
            continue
        why = "" if remedy == "advise" else _why_no_taint(new.node, cluster)
        if remedy == "auto" and not why and not budget.take(cluster.unix_s):
            why = "other nodes of the job were tainted within the hour"
        if remedy == "auto" and not why and cluster.shared and not cluster.shared.take(cluster.unix_s):
            why = "other nodes of the namespace's jobs were tainted within the hour"
        taint = remedy == "auto" and not why
        if taint:
            cluster.tainted.add(new.node)
        faults.append(
            Fault(
                node=new.node,
                kind=new.kind,
                incident=new.incident,
                detected=int(new.unix_s),
                text=_line(new.text),
                taint=taint,
                why=why,
                ordered=int(cluster.unix_s),
            )
        )
    return faults[-_MOST_FAULTS:]


def excluded(faults: Iterable[Fault]) -> list[str]:
    """The nodes that the job's pods must keep from."""
    return sorted({one.node for one in faults if one.taint and one.state != "Cleared"})


def orders(job: TrainingJob, nodes: Mapping[str, Node]) -> Iterator[Action]:
    """What is to be done to nodes for faults that are in the job's status already, so that none is done twice."""
    seen: set[tuple[str, str]] = set()
    for fault in job.status.faults:
        node, condition = nodes.get(fault.node), CONDITIONS[fault.kind]
        if fault.state != "Ordered" or node is None or (fault.node, fault.kind) in seen:
            continue
        seen.add((fault.node, fault.kind))
        message = reason_of(job, fault)
        if not node.has(condition):
            yield Mark(fault.node, condition, REASONS[fault.kind], message)
            yield Tell(
                {"apiVersion": "v1", "kind": "Node", "name": fault.node, "uid": fault.node},
                *(REASONS[fault.kind], message),
            )
        elif fault.taint and node.taint(TAINTS[fault.kind]) is None and not node.spec.unschedulable:
            key = TAINTS[fault.kind]
            yield SetTaints(
                fault.node,
                node.metadata.resource_version,
                (*(node.spec.taints or ()), Taint(key=key, value=VALUE, effect=EFFECT)),
                f"taint {key}:{EFFECT}: {message}",
            )


def tidied(nodes: Iterable[Node]) -> Iterator[SetTaints]:
    """Taints of ours are removed from nodes whose condition somebody has removed."""
    for node in nodes:
        keys = {
            key: CONDITIONS[kind]
            for kind, key in TAINTS.items()
            if _is_ours(node, key) and not node.has(CONDITIONS[kind])
        }
        if keys:
            left = _without(node, keys)
            conditions = ", ".join(keys.values())
            yield SetTaints(
                *(node.metadata.name, node.metadata.resource_version, left),
                f"taint {', '.join(sorted(keys))} removed, as condition {conditions} was",
            )


def cleared(node: Node) -> Iterator[Action]:
    """Everything of ours on a node is removed, as somebody orders it."""
    # The condition goes first: without it the operator takes no taint for ordered.
    for condition in CONDITIONS.values():
        if any(one.type == condition for one in node.status.conditions or ()):
            yield Unmark(node.metadata.name, condition)
    left = _without(node, set(TAINTS.values()))
    if len(left) < len(node.spec.taints or ()):
        yield SetTaints(node.metadata.name, "", left, "our taints removed")


def reason_of(job: TrainingJob, fault: Fault) -> str:
    """The reason as the node's condition and Event have it."""
    namespace, name = job.key
    return _line(f"keepstep job={namespace}/{name} incident={fault.incident:04d} {fault.text}")


def _proven(told: Sequence[FaultyNode], most: int, cluster: Cluster) -> Iterator[FaultyNode]:
    """The faults of the job's own nodes that the cluster does not contradict."""
    for _, group in itertools.groupby(told, key=lambda one: one.incident):
        own = [one for one in group if one.node in cluster.used]
        if len({one.node for one in own}) > most:
            continue  # many at once are the network's doing, and exclude nobody
        for one in own:
            node = cluster.nodes.get(one.node)
            # A node made later is another one of the same name.
            is_another = node is not None and node.metadata.created_unix_s > one.unix_s
            if not is_another and (one.kind != "lost" or _is_lost(one.node, cluster.nodes)):
                yield one


def _is_lost(name: str, nodes: Mapping[str, Node]) -> bool:
    """Whether a node's kubelet is not heard, and most others' are."""
    node = nodes.get(name)
    silent = sum(not one.is_ready for one in nodes.values())
    return node is not None and not node.is_ready and silent <= max(1, len(nodes) // 10)


def _why_no_taint(name: str, cluster: Cluster) -> str:
    node = cluster.nodes.get(name)
    if node is None:
        return "the cluster has no such node"
    if any(label in (node.metadata.labels or {}) for label in CONTROL_PLANE):
        return "the node is one of the control plane's"
    if node.spec.unschedulable:
        return "the node is cordoned already"
    ours = {
        one.metadata.name
        for one in cluster.nodes.values()
        if any(_is_ours(one, key) for key in TAINTS.values())
    }
    taken = ours | cluster.tainted
    if name not in taken and len(taken) >= max(1, len(cluster.nodes) // 10):
        return "a tenth of the cluster's nodes are tainted already"
    return ""


def _moved_on(fault: Fault, node: Node | None) -> Fault:
    """A fault as far as its order has come by what the node shows."""
    if fault.state == "Cleared":
        return fault
    if node is None:
        return msgspec.structs.replace(fault, state="Cleared", why="the node has left the cluster")
    marked, key = node.has(CONDITIONS[fault.kind]), TAINTS[fault.kind]
    shown = marked and (not fault.taint or node.taint(key) is not None)
    if fault.state == "Done":
        return (
            fault if shown else msgspec.structs.replace(fault, state="Cleared", why="somebody has cleared it")
        )
    if marked and fault.taint and not shown and node.spec.unschedulable:
        return msgspec.structs.replace(fault, state="Done", taint=False, why="the node is cordoned already")
    return msgspec.structs.replace(fault, state="Done") if shown else fault


def _without(node: Node, keys: Collection[str]) -> tuple[Taint, ...]:
    """A node's taints without those of ours that have one of these keys."""
    return tuple(one for one in node.spec.taints or () if one.key not in keys or one.value != VALUE)


def _is_ours(node: Node, key: str) -> bool:
    return any(one.key == key and one.value == VALUE for one in node.spec.taints or ())


def _line(text: str) -> str:
    return one_line(text).replace('"', "'")[:_MOST_TEXT]
