"""Pods that somebody else makes and that are to be watched, as the rest of the operator knows a job. Pure.

What is done about a node is what is done for a `TrainingJob` (`node_remedies`). Such a job has no status, so what it
has told of a node, and how far that has come, is noted on the node itself, in an annotation: first the note, and what
it says once it is seen there. None of these pods is ever ended by the operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from keepstep.kubernetes.actions import Action, Note, Tell
from keepstep.kubernetes.ends import short
from keepstep.kubernetes.job_plan import HOUR_S
from keepstep.kubernetes.node_remedies import (
    EFFECT,
    ORDER,
    TAINTS,
    Cluster,
    believed,
    judged,
    orders,
    reason_of,
)
from keepstep.kubernetes.objects import (
    FAULTS,
    JOB,
    REMEDY,
    SECRET,
    WATCH,
    Fault,
    JobSpec,
    JobStatus,
    Meta,
    Node,
    Pod,
    Remedy,
    TrainingJob,
)
from keepstep.launch.schedulers.node_faults import DrainBudget
from keepstep.wire.messages import FaultyNode

JobKey = tuple[str, str]
_MOST_JOBS = 500
_MOST_NOTES = 60
"""On one node."""


class Noted(msgspec.Struct, frozen=True):
    """A fault that a job, ``NAMESPACE/NAME``, has told of the node on which this is noted."""

    job: str
    fault: Fault


class Unseen:
    """Notes that were written and are not seen on their nodes yet: until then nothing else is judged, as they count."""

    def __init__(self) -> None:
        self._versions: dict[str, str] = {}  # by node: the one that the note was written to

    def add(self, note: Note) -> None:
        """It is written now."""
        self._versions[note.node] = note.version

    def drop(self, note: Note) -> None:
        """The API server has refused it."""
        self._versions.pop(note.node, None)

    def on(self, nodes: Mapping[str, Node]) -> set[str]:
        """Their nodes. One that has changed shows its note, as no other change came before that."""
        self._versions = {
            name: version
            for name, version in self._versions.items()
            if name in nodes and nodes[name].metadata.resource_version == version
        }
        return set(self._versions)


def watched_jobs(pods: Iterable[Pod]) -> dict[JobKey, list[Pod]]:
    """The pods of each job by its namespace and name, the oldest jobs first, without those of `TrainingJob`s."""
    found: dict[JobKey, list[Pod]] = {}
    for one in sorted(
        pods, key=lambda one: (one.metadata.created_unix_s, len(one.metadata.name), one.metadata.name)
    ):
        labels = one.metadata.labels or {}
        if labels.get(WATCH) and JOB not in labels:
            found.setdefault((one.metadata.namespace, labels[WATCH]), []).append(one)
    return {key: found[key] for key in list(found)[:_MOST_JOBS]}


def doubt_of(pods: Iterable[Pod]) -> tuple[str, str] | None:
    """Reason and message why nothing is believed of a job with these pods; None where it is.

    Who chooses a node by name could have any node called bad; who tolerates our taints could do so again and again.
    """
    for one in pods:
        if one.chose_its_node:
            return "ChoosesNode", f"pod {one.metadata.name} was not put on its node by the scheduler"
        for each in one.spec.tolerations or ():
            everything = not each.key and each.operator == "Exists"
            if each.effect in ("", EFFECT) and (everything or each.key in TAINTS.values()):
                return "ToleratesTaint", f"pod {one.metadata.name} tolerates keepstep's taints"
        if _remedy_of(one) not in ORDER:
            return (
                "RemedyUnknown",
                f"pod {one.metadata.name} has {REMEDY} {_remedy_of(one)}: say off, advise or auto",
            )
    return None


def places_of(pods: Iterable[Pod], *phases: str) -> set[str]:
    """The nodes on which pods have run that are believed, and are in one of the phases."""
    wanted = phases or ("Running", "Succeeded", "Failed", "Unknown")
    began = [one for one in pods if one.spec.node_name and one.status.phase in wanted]
    return {one.spec.node_name for one in began if doubt_of([one]) is None}


def job_of(key: JobKey, pods: Sequence[Pod], notes: Mapping[str, Sequence[Noted]]) -> TrainingJob:
    """A job with these pods, at least one, the oldest first. Its size is the number of nodes on which they run."""
    noted = (one for on_node in notes.values() for one in on_node if one.job == "/".join(key))
    return TrainingJob(
        spec=JobSpec(
            nodes=len(places_of(pods, "Running")),
            template={},
            secret_name=(pods[0].metadata.annotations or {}).get(SECRET, "keepstep"),
            node_remedy=_least_remedy(pods),
        ),
        metadata=Meta(namespace=key[0], name=key[1], creation_timestamp=pods[0].metadata.creation_timestamp),
        status=JobStatus(faults=[one.fault for one in noted]),
    )


def notes_on(nodes: Mapping[str, Node], unix_s: float) -> dict[str, list[Noted]]:
    """What is noted on each node that has a note. An order that nobody has carried out for an hour is none any more."""
    found: dict[str, list[Noted]] = {}
    for name, node in nodes.items():
        text = (node.metadata.annotations or {}).get(FAULTS)
        if text is None:
            continue
        try:
            noted = msgspec.json.decode(text, type=list[Noted])
        except msgspec.MsgspecError:
            continue  # an unreadable note is written anew once there is something to note
        found[name] = [_aged(one, unix_s) for one in noted if one.fault.node == name]
    return found


def to_be_tainted(notes: Mapping[str, Sequence[Noted]]) -> set[str]:
    """The nodes that are to get a taint by what is noted, and may not have it yet."""
    return {
        name
        for name, noted in notes.items()
        if any(one.fault.taint and one.fault.state == "Ordered" for one in noted)
    }


def budget_of(jobs: Mapping[JobKey, Sequence[Pod]], notes: Mapping[str, Sequence[Noted]]) -> DrainBudget:
    """How many nodes all jobs of one namespace may taint now, as who makes pods may call as many jobs as he likes."""
    running = {one for pods in jobs.values() for one in places_of(pods, "Running")}
    spaces = {namespace for namespace, _ in jobs}
    budget = DrainBudget(len(running))
    faults = [one.fault for noted in notes.values() for one in noted if one.job.partition("/")[0] in spaces]
    for at_s in sorted(one.ordered for one in faults if one.taint):
        budget.take(at_s)
    return budget


def remedies_for(
    key: JobKey,
    pods: Sequence[Pod],
    told: Sequence[FaultyNode],
    notes: Mapping[str, Sequence[Noted]],
    cluster: Cluster,
) -> Iterator[Action]:
    """What is to be done now about nodes that a job with these pods has told of."""
    job = job_of(key, pods, notes)
    new = believed(job, told, pods, cluster.unix_s) if doubt_of(pods) is None else []
    faults = judged(job, new, cluster)
    for name in sorted({one.node for one in faults} & cluster.nodes.keys()):
        before = notes.get(name, ())
        own = [Noted("/".join(key), one) for one in faults if one.node == name]
        after = _kept([*(one for one in before if one.job != own[0].job), *own], cluster.unix_s)
        if after != list(before):
            changed = [one.fault for one in after if one not in before]
            why = "; ".join(
                f"{reason_of(job, one)} ({one.state}{', taint' if one.taint else ''})" for one in changed[:2]
            )
            version = cluster.nodes[name].metadata.resource_version
            yield Note(name, version, FAULTS, msgspec.json.encode(after).decode(), why or "old ones removed")
    yield from orders(job, cluster.nodes)


def told_about(pods: Sequence[Pod], reason: str, message: str) -> Tell:
    """An Event, about the oldest pod, that says whether its job is heard."""
    meta = pods[0].metadata
    about = {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": meta.namespace,
        "name": meta.name,
        "uid": meta.uid,
    }
    return Tell(about, reason, short(message), is_warning=reason != "Watched")


def _remedy_of(pod: Pod) -> str:
    return (pod.metadata.annotations or {}).get(REMEDY, "advise")


def _least_remedy(pods: Sequence[Pod]) -> Remedy:
    for one in ORDER:
        if any(_remedy_of(each) == one for each in pods):
            return one
    return "off"


def _aged(one: Noted, unix_s: float) -> Noted:
    fault = one.fault
    if fault.state != "Ordered" or unix_s - fault.ordered < HOUR_S:
        return one
    return Noted(one.job, msgspec.structs.replace(fault, state="Cleared", why="not done within an hour"))


def _kept(noted: list[Noted], unix_s: float) -> list[Noted]:
    """Of each job and kind the newest, by which the others are known, and taints that count within the hour."""
    noted.sort(key=lambda one: (one.job, one.fault.kind, one.fault.detected))
    newest = {(one.job, one.fault.kind): one for one in noted}
    kept = [
        one
        for one in noted
        if one is newest[one.job, one.fault.kind] or (one.fault.taint and unix_s - one.fault.ordered < HOUR_S)
    ]
    kept.sort(key=lambda one: one.fault.ordered)
    return sorted(kept[-_MOST_NOTES:], key=lambda one: (one.job, one.fault.kind, one.fault.detected))
