"""A cluster in memory, in front of what the operator decides: versions, uids, a scheduler, kubelets, evictions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import msgspec

from keepstep.kubernetes import node_remedies
from keepstep.kubernetes.actions import Action, EndPod, Make, Mark, Report, SetTaints, Tell, Unmark
from keepstep.kubernetes.job_plan import Seen, reconcile
from keepstep.kubernetes.objects import ATTEMPT, INDEX, Node, Pod, TrainingJob
from keepstep.kubernetes.since import Since
from keepstep.wire.messages import FaultyNode, Overview

Object = dict[str, Any]
EPOCH_S = 1_700_000_000
TEMPLATE: Object = {"spec": {"containers": [{"name": "train", "command": ["keepstep", "run"]}]}}


def stamp(now_s: float) -> str:
    """A moment as the API server writes it."""
    return datetime.fromtimestamp(EPOCH_S + now_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def training_job(nodes: int = 3, spares: int = 1, **spec: Any) -> Object:
    return {
        "metadata": {
            "namespace": "ml",
            "name": "train",
            "uid": "job-1",
            "resourceVersion": "1",
            "generation": 1,
            "creationTimestamp": stamp(1000.0),
        },
        "spec": {"nodes": nodes, "spares": spares, "template": TEMPLATE, **spec},
    }


def node(name: str, *, ready: bool = True) -> Object:
    ready_now = {"type": "Ready", "status": "True" if ready else "Unknown"}
    return {
        "metadata": {"name": name, "resourceVersion": "1"},
        "spec": {},
        "status": {"conditions": [ready_now]},
    }


@dataclass
class VirtualCluster:
    """Objects as in JSON. ``refuses``: whether the API server is away for an action."""

    job: Object = field(default_factory=training_job)
    nodes: dict[str, Object] = field(default_factory=lambda: {f"n{i}": node(f"n{i}") for i in range(8)})
    pods: dict[str, Object] = field(default_factory=dict)
    has_service: bool = False
    told: Overview | None = None
    trouble: tuple[str, str] = ("", "")
    now_s: float = 1000.0
    made: list[str] = field(default_factory=list)
    events: list[Tell] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    refuses: Callable[[Action], bool] = lambda _: False
    since: Since = field(default_factory=Since)
    detected: dict[int, float] = field(default_factory=dict)
    _count: int = 1
    _read: str = ""  # version of the job at the last look

    # --- what the operator sees and does ----------------------------------------------------------------------------

    def view(self) -> VirtualCluster:
        """What an operator sees that has not heard of anything later."""
        seen = copy.deepcopy((self.job, self.nodes, self.pods))
        return VirtualCluster(*seen, self.has_service, self.told, self.trouble, self.now_s)

    def seen(self, since: Since | None = None) -> Seen:
        return Seen(
            job=msgspec.convert(self.job, TrainingJob),
            pods=[msgspec.convert(one, Pod) for one in self.pods.values()],
            has_service=self.has_service,
            nodes={name: msgspec.convert(one, Node) for name, one in self.nodes.items()},
            told=self.told,
            trouble=self.trouble,
            since=since or self.since,
            unix_s=EPOCH_S + self.now_s,
        )

    def look(self, view: VirtualCluster | None = None, since: Since | None = None) -> list[Action]:
        """One look of an operator, and what it does."""
        since = since or self.since
        since.turn(self.now_s)
        seen = (view or self).seen(since)
        self._read = seen.job.metadata.resource_version
        actions = [*node_remedies.tidied(seen.nodes.values()), *reconcile(seen)]
        for one in actions:
            if not self.refuses(one):
                self.do(one)
        self.actions += actions
        return actions

    def settle(self, seconds: float = 10.0, step_s: float = 1.0) -> None:
        """Let time pass, with looks, the scheduler and kubelets."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += step_s
            self.look()
            self.schedule()

    def do(self, action: Action) -> None:
        {
            Make: self._make,
            EndPod: self._end_pod,
            Report: self._report,
            Mark: self._mark,
            Unmark: self._unmark,
            SetTaints: self._set_taints,
            Tell: self.events.append,
        }[type(action)](action)

    def _make(self, action: Make) -> None:
        what, name = copy.deepcopy(action.what), action.what["metadata"]["name"]
        if what["kind"] == "Service":
            self.has_service = True
        elif name not in self.pods:
            what["metadata"] |= {"uid": f"pod-{self._next()}", "creationTimestamp": stamp(self.now_s)}
            # What the scheduler sets is no managed field.
            what["metadata"]["managedFields"] = [{"fieldsV1": {"f:spec": {"f:containers": {}}}}]
            what["status"] = {"phase": "Pending"}
            self.pods[name] = what
            self.made.append(name)

    def _end_pod(self, action: EndPod) -> None:
        pod = self.pods.get(action.name)
        if pod is None or pod["metadata"]["uid"] != action.uid:
            return
        gone = pod["status"]["phase"] in ("Succeeded", "Failed", "Pending")
        if action.now or gone or self.is_ready(pod["spec"].get("nodeName", "")):
            del self.pods[action.name]
        else:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    def _report(self, action: Report) -> None:
        if self._read == self.job["metadata"]["resourceVersion"]:
            self.job["status"] = msgspec.to_builtins(action.status)
            self.job["metadata"]["resourceVersion"] = self._next()

    def _mark(self, action: Mark) -> None:
        if action.node in self.nodes:
            self._unmark(Unmark(action.node, action.condition))
            conditions = self.nodes[action.node]["status"]["conditions"]
            conditions.append({"type": action.condition, "status": "True", "message": action.message})

    def _unmark(self, action: Unmark) -> None:
        one = self.nodes[action.node]
        kept = [each for each in one["status"]["conditions"] if each["type"] != action.condition]
        one["status"]["conditions"] = kept
        one["metadata"]["resourceVersion"] = self._next()

    def _set_taints(self, action: SetTaints) -> None:
        one = self.nodes.get(action.node)
        if one is not None and action.version in ("", one["metadata"]["resourceVersion"]):
            one["spec"]["taints"] = list(msgspec.to_builtins(action.taints))
            one["metadata"]["resourceVersion"] = self._next()

    # --- what happens in the cluster --------------------------------------------------------------------------------

    @property
    def status(self) -> Object:
        return self.job.get("status", {})

    def is_ready(self, name: str) -> bool:
        conditions = self.nodes.get(name, {"status": {"conditions": []}})["status"]["conditions"]
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    def schedule(self) -> None:
        """Pods get nodes on which no other pod of the job is, and begin."""
        for pod in self.pods.values():
            if not pod["spec"].get("nodeName"):
                free = [name for name in self.nodes if self._fits(pod, name)]
                if free:
                    pod["spec"]["nodeName"] = free[0]
                    address = f"10.0.0.{self._next()}"
                    pod["status"] = {
                        "phase": "Running",
                        "podIP": address,
                        "startTime": stamp(self.now_s),
                    }

    def end(self, name: str, code: int, message: str = "", reason: str = "") -> None:
        """The container of a pod ends."""
        ended = {"exitCode": code, "message": message}
        self.pods[name]["status"] |= {
            "phase": "Failed" if code else "Succeeded",
            "reason": reason,
            "containerStatuses": [{"name": "train", "state": {"terminated": ended}}],
        }

    def end_all(self, code: int, message: str = "") -> None:
        for name in self.running():
            self.end(name, code, message)

    def running(self) -> list[str]:
        return sorted(name for name, pod in self.pods.items() if pod["status"]["phase"] == "Running")

    def lose(self, name: str) -> None:
        """Nothing is heard of a node any more."""
        self.nodes[name]["status"]["conditions"][0] = {"type": "Ready", "status": "Unknown"}

    def recover(self, name: str) -> None:
        self.nodes[name]["status"]["conditions"][0] = {"type": "Ready", "status": "True"}

    def evict(self, name: str) -> None:
        """A pod is deleted by the cluster; on a node that is not heard it stays so."""
        pod = self.pods[name]
        if self.is_ready(pod["spec"].get("nodeName", "")):
            del self.pods[name]
        else:
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    def tells(self, *faults: tuple[str, str, int], state: str = "running", spares: int = 1) -> None:
        """The job's controller tells of bad nodes: node, kind, incident, which was detected when it is told first."""
        rows = [
            FaultyNode(one, kind, number, self.detected.setdefault(number, EPOCH_S + self.now_s), "it is bad")  # type: ignore[arg-type]
            for one, kind, number in faults
        ]
        self.told = Overview(state, 3, spares, 7, verdict="incident 0001: SLOW rank 5", faults=tuple(rows))

    def node_of(self, index: int) -> str:
        return self.pods[f"train-{index}"]["spec"]["nodeName"]

    def taints(self, name: str) -> dict[str, str]:
        return {one["key"]: one["effect"] for one in self.nodes[name]["spec"].get("taints", ())}

    def conditions(self, name: str) -> set[str]:
        return {one["type"] for one in self.nodes[name]["status"]["conditions"]} - {"Ready"}

    def attempt_of(self, name: str) -> tuple[int, int]:
        labels = self.pods[name]["metadata"]["labels"]
        return int(labels[INDEX]), int(labels[ATTEMPT])

    def _fits(self, pod: Object, name: str) -> bool:
        taken = {one["spec"].get("nodeName") for one in self.pods.values()}
        repelled = any(
            one["effect"] != "PreferNoSchedule" for one in self.nodes[name]["spec"].get("taints", ())
        )
        affinity = pod["spec"]["affinity"].get("nodeAffinity", {})
        terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get(
            "nodeSelectorTerms", ()
        )
        excluded = {each["values"][0] for term in terms for each in term["matchFields"]}
        return self.is_ready(name) and name not in taken and not repelled and name not in excluded

    def _next(self) -> str:
        self._count += 1
        return str(self._count)
