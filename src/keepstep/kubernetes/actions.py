"""What the operator may do to a cluster. Each action says in a line what it does, for ``--dry-run`` and for the log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from keepstep.kubernetes.objects import JobStatus, Taint

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Make:
    """Make a Service or pod."""

    what: Object

    def __str__(self) -> str:
        return f"make {self.what['kind'].lower()} {_named(self.what['metadata'])}"


@dataclass(frozen=True, slots=True)
class EndPod:
    """End a pod. ``now``: forget it at once, as its node is lost and will not say that it has ended."""

    namespace: str
    name: str
    uid: str
    why: str
    now: bool = False

    def __str__(self) -> str:
        return f"{'forget' if self.now else 'end'} pod {self.namespace}/{self.name}: {self.why}"


@dataclass(frozen=True, slots=True)
class Report:
    """Write a job's status, if nobody has changed the job since it was looked at."""

    namespace: str
    name: str
    status: JobStatus
    is_urgent: bool  # what is to be done next depends on it

    def __str__(self) -> str:
        status = self.status
        told = " ".join(part for part in (status.phase, status.reason, status.message) if part)
        return f"trainingjob {self.namespace}/{self.name}: {told}"


@dataclass(frozen=True, slots=True)
class Mark:
    """Set a condition of a node."""

    node: str
    condition: str
    reason: str
    message: str

    def __str__(self) -> str:
        return f"node {self.node}: condition {self.condition}: {self.message}"


@dataclass(frozen=True, slots=True)
class Unmark:
    """Remove a condition of a node."""

    node: str
    condition: str

    def __str__(self) -> str:
        return f"node {self.node}: condition {self.condition} removed"


@dataclass(frozen=True, slots=True)
class SetTaints:
    """Give a node these taints, if nobody has changed it since it was looked at."""

    node: str
    version: str
    taints: tuple[Taint, ...]
    why: str

    def __str__(self) -> str:
        return f"node {self.node}: {self.why}"


@dataclass(frozen=True, slots=True)
class Note:
    """Give a node an annotation, if nobody has changed it since it was looked at."""

    node: str
    version: str
    annotation: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"node {self.node}: note: {self.why}"


@dataclass(frozen=True, slots=True)
class Tell:
    """Make an Event about an object."""

    about: Object  # reference to it
    reason: str
    message: str
    is_warning: bool = True

    def __str__(self) -> str:
        return f"event {self.reason} about {self.about['kind'].lower()} {_named(self.about)}: {self.message}"


def _named(meta: Object) -> str:
    return f"{meta['namespace']}/{meta['name']}" if meta.get("namespace") else str(meta["name"])


Action: TypeAlias = Make | EndPod | Report | Mark | Unmark | SetTaints | Note | Tell
