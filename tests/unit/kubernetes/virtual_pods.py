"""Pods that somebody else makes, in a cluster in memory, as the operator sees them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.unit.kubernetes.virtual_cluster import EPOCH_S, node, stamp

from keepstep.kubernetes import node_remedies, watched
from keepstep.kubernetes.actions import Action, Mark, Note, SetTaints, Tell
from keepstep.kubernetes.objects import REMEDY, WATCH, Node, Pod, Remedy
from keepstep.wire.messages import FaultyNode

Object = dict[str, Any]
BY_MAKER = [{"manager": "kube-controller-manager", "fieldsV1": {"f:spec": {"f:containers": {}}}}]
BY_NAME = [{"manager": "kubectl", "fieldsV1": {"f:spec": {"f:containers": {}, "f:nodeName": {}}}}]


def pod(
    name: str,
    on: str = "",
    *,
    job: str = "train",
    remedy: str = "auto",
    now_s: float = 1000.0,
    managed: Any = BY_MAKER,
    tolerations: Sequence[Object] = (),
    labels: Object | None = None,
    phase: str = "Running",
    **annotations: str,
) -> Object:
    """A pod that runs on a node, or waits for one."""
    return {
        "metadata": {
            "namespace": "ml",
            "name": name,
            "uid": f"uid-{name}",
            "creationTimestamp": stamp(now_s),
            "labels": {WATCH: job, **(labels or {})},
            "annotations": {REMEDY: remedy}
            | {f"keepstep.dev/{key}": each for key, each in annotations.items()},
            "managedFields": managed,
        },
        "spec": {"nodeName": on, "tolerations": list(tolerations)},
        "status": {"phase": phase if on else "Pending"},
    }


def read(*pods: Object) -> list[Pod]:
    return [msgspec.convert(one, Pod) for one in pods]


@dataclass
class VirtualPods:
    """Objects as in JSON; ``told``: what the controllers of jobs tell, by the job's name."""

    pods: list[Object] = field(default_factory=list)
    nodes: dict[str, Object] = field(default_factory=lambda: {f"n{i}": node(f"n{i}") for i in range(8)})
    told: dict[str, list[FaultyNode]] = field(default_factory=dict)
    most: Remedy = "auto"
    now_s: float = 1000.0
    places: dict[str, set[str]] = field(default_factory=dict)
    unseen: watched.Unseen = field(default_factory=watched.Unseen)
    actions: list[Action] = field(default_factory=list)
    _count: int = 1

    def tells(
        self, name: str, kind: str, incident: int, *, job: str = "train", text: str = "it is bad"
    ) -> None:
        """A job's controller tells of a node, now."""
        fault = FaultyNode(name, kind, incident, EPOCH_S + self.now_s, text)  # type: ignore[arg-type]
        self.told.setdefault(job, []).append(fault)

    def view(self) -> tuple[list[Pod], dict[str, Node]]:
        """What an operator sees that has not heard of anything later."""
        return read(*copy.deepcopy(self.pods)), {
            name: msgspec.convert(copy.deepcopy(one), Node) for name, one in self.nodes.items()
        }

    def look(self, view: tuple[list[Pod], dict[str, Node]] | None = None) -> list[Action]:
        """One look of the operator, and what it does."""
        (pods, nodes), places = view or self.view(), self.places
        unix_s = EPOCH_S + self.now_s
        actions: list[Action] = [*node_remedies.tidied(nodes.values())]
        if self.unseen.on(nodes):
            pods = []
        notes = watched.notes_on(nodes, unix_s)
        tainted = watched.to_be_tainted(notes)
        jobs = watched.watched_jobs(pods)
        budget = watched.budget_of(jobs, notes)
        for key, own in jobs.items():
            used = places.setdefault(key[1], set())
            used |= watched.places_of(own)
            cluster = node_remedies.Cluster(nodes, used, self.most, unix_s, tainted, budget)
            actions += watched.remedies_for(key, own, self.told.get(key[1], ()), notes, cluster)
        for one in actions:
            if isinstance(one, Note):
                self.unseen.add(one)
            if not self.do(one) and isinstance(one, Note):
                self.unseen.drop(one)
        self.actions += actions
        return actions

    def settle(self, seconds: float = 5.0) -> None:
        """Let time pass, with a look each second."""
        for _ in range(round(seconds)):
            self.now_s += 1.0
            self.look()

    def take_over(self) -> None:
        """Another operator acts from now on."""
        self.places, self.unseen = {}, watched.Unseen()

    def do(self, action: Action) -> bool:
        """Do it; false where it is refused."""
        if isinstance(action, Tell):
            return True
        assert isinstance(action, Mark | Note | SetTaints), f"never: {action}"
        one = self.nodes.get(action.node)
        if one is None:
            return False
        if isinstance(action, Mark):
            self.uncondition(action.node, action.condition)
            one["status"]["conditions"].append(
                {"type": action.condition, "status": "True", "message": action.message}
            )
        elif action.version == one["metadata"]["resourceVersion"]:
            if isinstance(action, Note):
                one["metadata"].setdefault("annotations", {})[action.annotation] = action.value
            else:
                one["spec"]["taints"] = list(msgspec.to_builtins(action.taints))
        else:
            return False
        self._count += 1
        one["metadata"]["resourceVersion"] = str(self._count)
        return True

    def uncondition(self, name: str, condition: str) -> None:
        """Somebody removes a condition."""
        one = self.nodes[name]
        kept = [each for each in one["status"]["conditions"] if each["type"] != condition]
        one["status"]["conditions"] = kept
        self._count += 1
        one["metadata"]["resourceVersion"] = str(self._count)

    def taints(self, name: str) -> list[str]:
        return [one["key"] for one in self.nodes[name]["spec"].get("taints", ())]

    def conditions(self, name: str) -> dict[str, str]:
        found = self.nodes[name]["status"]["conditions"]
        return {one["type"]: one["message"] for one in found if one["type"] != "Ready"}

    def shown(self) -> dict[str, tuple[list[str], list[str]]]:
        """Conditions and taints of all nodes that have any."""
        found = {name: (sorted(self.conditions(name)), self.taints(name)) for name in self.nodes}
        return {name: one for name, one in found.items() if one != ([], [])}
