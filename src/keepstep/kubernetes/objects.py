"""What the operator reads of Kubernetes' objects. A field of another form than Kubernetes' own is an error at once."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

GROUP = "keepstep.dev"
VERSION = "v1alpha1"
KIND = "TrainingJob"
JOB, INDEX, ATTEMPT = f"{GROUP}/job", f"{GROUP}/index", f"{GROUP}/attempt"
"""Labels of a job's pods."""
WATCH = f"{GROUP}/watch"
"""Label of pods that somebody else makes and that are to be watched: the name of their job."""
SECRET, REMEDY = f"{GROUP}/secret", f"{GROUP}/node-remedy"
"""Annotations of such pods."""
FAULTS = f"{GROUP}/faults"
"""Annotation of a node: the faults that such jobs have told of it, and what was done about them."""

FaultKind = Literal["hardware", "lost", "slow"]
Remedy = Literal["off", "advise", "auto"]
Phase = Literal["", "Pending", "Running", "Restarting", "Succeeded", "Failed"]
ENDS: tuple[Phase, ...] = ("Succeeded", "Failed")


class _Read(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """Base class of what is read."""


class Owner(_Read, frozen=True):
    """Who made an object."""

    uid: str = ""
    controller: bool | None = None


class ManagedFields(_Read, frozen=True):
    """Which fields somebody has set, in the API server's own form: ``{"f:spec": {"f:nodeName": {}}}``."""

    fields: dict[str, Any] | None = msgspec.field(default=None, name="fieldsV1")


class Meta(_Read, frozen=True):
    """What all objects have."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    creation_timestamp: datetime | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    managed_fields: list[ManagedFields] | None = None
    owner_references: list[Owner] | None = None

    @property
    def created_unix_s(self) -> float:
        """When the API server has made it, by that one's clock; 0 where it does not say."""
        return self.creation_timestamp.timestamp() if self.creation_timestamp is not None else 0.0


class Taint(_Read, frozen=True, omit_defaults=True):
    """A taint of a node."""

    key: str
    value: str = ""
    effect: str = ""
    time_added: str | None = None


class Condition(_Read, frozen=True, omit_defaults=True):
    """A condition of any object."""

    type: str
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = None


class _NodeSpec(_Read, frozen=True):
    unschedulable: bool | None = None
    taints: list[Taint] | None = None


class _NodeStatus(_Read, frozen=True):
    conditions: list[Condition] | None = None


class Node(_Read, frozen=True):
    """A node."""

    metadata: Meta = Meta()
    spec: _NodeSpec = _NodeSpec()
    status: _NodeStatus = _NodeStatus()

    @property
    def is_ready(self) -> bool:
        """Whether its kubelet says so, and is heard."""
        return self.has("Ready")

    def has(self, condition: str) -> bool:
        """Whether a condition holds."""
        return any(one.type == condition and one.status == "True" for one in self.status.conditions or ())

    def taint(self, key: str) -> Taint | None:
        """Its taint with this key; None without one."""
        return next((one for one in self.spec.taints or () if one.key == key), None)


class Terminated(_Read, frozen=True):
    """How a container has ended."""

    exit_code: int = 0
    message: str = ""
    reason: str = ""


class _ContainerState(_Read, frozen=True):
    terminated: Terminated | None = None


class _ContainerStatus(_Read, frozen=True):
    name: str = ""
    state: _ContainerState = _ContainerState()


class EnvVar(_Read, frozen=True):
    """A variable of a container's environment, or where its value comes from."""

    name: str
    value: str = ""
    value_from: dict[str, Any] | None = None


class Container(_Read, frozen=True):
    """A container, as far as it says what is started in it."""

    name: str = ""
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[EnvVar] | None = None
    env_from: list[dict[str, Any]] | None = None


class Toleration(_Read, frozen=True):
    """A toleration of a pod. No key: of all taints; no effect: of all effects."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class _PodSpec(_Read, frozen=True):
    node_name: str = ""
    hostname: str = ""
    subdomain: str = ""
    containers: list[Container] = []
    tolerations: list[Toleration] | None = None


class _PodStatus(_Read, frozen=True):
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    start_time: datetime | None = None
    pod_i_p: str = msgspec.field(default="", name="podIP")
    container_statuses: list[_ContainerStatus] | None = None


class Pod(_Read, frozen=True):
    """A pod."""

    metadata: Meta = Meta()
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()

    @property
    def index(self) -> int:
        """Its place in its job; -1 where its labels do not say."""
        return _number((self.metadata.labels or {}).get(INDEX, ""))

    @property
    def attempt(self) -> int:
        """In which attempt of its job it was made; -1 where its labels do not say."""
        return _number((self.metadata.labels or {}).get(ATTEMPT, ""))

    @property
    def hostname(self) -> str:
        """Its host name, within its subdomain, as its kubelet sets it."""
        return (self.spec.hostname or self.metadata.name)[:63].rstrip("-.")

    @property
    def chose_its_node(self) -> bool:
        """Whether whoever made it may have named its node: one that the scheduler has named is no managed field."""
        managed = self.metadata.managed_fields
        return bool(self.spec.node_name) and (
            not managed or any("f:nodeName" in ((one.fields or {}).get("f:spec") or {}) for one in managed)
        )

    @property
    def started_unix_s(self) -> float:
        """When its kubelet took it up, by that one's clock; 0 where it does not say."""
        return self.status.start_time.timestamp() if self.status.start_time is not None else 0.0

    @property
    def terminated(self) -> Terminated | None:
        """How its first container has ended, which runs the launcher."""
        first = self.spec.containers[0].name if self.spec.containers else ""
        found = [one.state.terminated for one in self.status.container_statuses or () if one.name == first]
        return found[0] if found else None

    def belongs_to(self, uid: str) -> bool:
        """Whether the object with this id made it."""
        return any(one.uid == uid and one.controller for one in self.metadata.owner_references or ())


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1


class Fault(_Read, frozen=True, omit_defaults=True):
    """A fault of a node that a job has told, and what was done about it.

    Attributes:
        detected: Unix time of the incident, in whole seconds.
        state: ``Ordered`` until the node shows the condition (and the taint, if wanted), ``Done`` then, ``Cleared``
            once somebody has removed them.
        taint: whether the node gets a taint, too.
        why: why it gets none although the job's remedy is "auto".
        ordered: Unix time of the order, in whole seconds.
    """

    node: str
    kind: FaultKind
    incident: int = 0
    detected: int = 0
    text: str = ""
    state: Literal["Ordered", "Done", "Cleared"] = "Ordered"
    taint: bool = False
    why: str = ""
    ordered: int = 0


class Again(_Read, frozen=True):
    """How often the pod of an index was made again in this attempt, and which one was the last to end."""

    times: int = 0
    pod: str = ""


class JobStatus(_Read, frozen=True, omit_defaults=True):
    """The status of a `TrainingJob`, which the operator alone writes."""

    phase: Phase = ""
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    attempt: int = 0
    killed: int = 0  # launchers, within an hour from `killed_since`, which is Unix time
    killed_since: int = 0
    running: str = ""  # "3/4": how many pods run, and how many there are to be
    nodes: list[str] = []  # by index; "-" where a pod has no node
    former_nodes: list[str] = []
    excluded_nodes: list[str] = []
    avoided_nodes: list[str] = []
    verdict: str = ""
    # The job's state, as its controller told it.
    state: str = ""
    again: dict[str, Again] = {}
    faults: list[Fault] = []
    conditions: list[Condition] = []


class JobSpec(_Read, frozen=True):
    """What a user wants of a `TrainingJob`."""

    nodes: int
    template: dict[str, Any]
    spares: int = 0
    excluded_nodes: list[str] = []
    secret_name: str = "keepstep"
    node_remedy: Remedy = "advise"
    restart_limit: int = 10
    pod_restart_limit: int = 20

    @property
    def pods(self) -> int:
        """How many pods there are to be, spares included."""
        return self.nodes + self.spares


class TrainingJob(_Read, frozen=True):
    """A training job, as its user and the operator have written it."""

    spec: JobSpec
    metadata: Meta = Meta()
    status: JobStatus = JobStatus()

    @property
    def key(self) -> tuple[str, str]:
        """Its namespace and name."""
        return self.metadata.namespace, self.metadata.name
