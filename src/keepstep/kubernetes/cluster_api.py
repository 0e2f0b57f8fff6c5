"""Kubernetes' API as the operator uses it: objects as plain JSON, and each action as one or two requests."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timezone
from typing import Any, ClassVar, cast

import httpx2
import msgspec
from lightkube import ApiError, AsyncClient, generic_resource
from lightkube.types import PatchType

from keepstep.core.errors import UsageError
from keepstep.core.log_lines import one_line
from keepstep.core.within import within
from keepstep.kubernetes.actions import (
    Action,
    EndPod,
    Make,
    Mark,
    Note,
    Object,
    Report,
    SetTaints,
    Tell,
    Unmark,
)
from keepstep.kubernetes.objects import GROUP, KIND, VERSION

_generic: Any = generic_resource
JOBS: Any = _generic.create_namespaced_resource(GROUP, VERSION, KIND, "trainingjobs")
PODS: Any = _generic.create_namespaced_resource("", "v1", "Pod", "pods")
SERVICES: Any = _generic.create_namespaced_resource("", "v1", "Service", "services")
SECRETS: Any = _generic.create_namespaced_resource("", "v1", "Secret", "secrets")
EVENTS: Any = _generic.create_namespaced_resource("", "v1", "Event", "events")
LEASES: Any = _generic.create_namespaced_resource("coordination.k8s.io", "v1", "Lease", "leases")
NODES: Any = _generic.create_global_resource("", "v1", "Node", "nodes")

FAILURES = (httpx2.HTTPError, httpx2.StreamError, OSError, asyncio.TimeoutError, msgspec.MsgspecError)
"""What a request may raise: refused, no connection, no answer, or an answer that is none."""
NOT_THERE, CONFLICT, GONE, FORBIDDEN = 404, 409, 410, 403
_REQUEST_S = 15.0
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
_MADE: Mapping[str, Any] = {"Pod": PODS, "Service": SERVICES}


def client_from_environment() -> AsyncClient:
    """A client as the pod's service account, or as ``$KUBECONFIG`` or ``~/.kube/config`` say."""
    from lightkube.core.exceptions import ConfigError

    try:
        return AsyncClient(field_manager="keepstep-operator", timeout=httpx2.Timeout(_REQUEST_S))
    except (ConfigError, OSError) as error:
        raise UsageError(f"no cluster: {error}; run this in a pod, or set KUBECONFIG") from error


def code_of(error: BaseException) -> int:
    """The HTTP code with which a request was refused; 0 where there was no answer."""
    if isinstance(error, ApiError) and error.status.code:
        return error.status.code
    return error.response.status_code if isinstance(error, httpx2.HTTPStatusError) and error.response else 0


def told_by(error: BaseException) -> str:
    """Why a request failed, in one line."""
    return one_line(str(error).strip() or type(error).__name__)[:500]


class Api:
    """Carries actions out."""

    def __init__(self, client: Any, warn: Callable[[str], None]) -> None:
        self.client, self._warn = client, warn  # its overloads know only the library's own models

    async def get(self, kind: Any, name: str, namespace: str | None = None) -> Object | None:
        """An object; None where there is no such one."""
        # The name becomes part of the request's path.
        if _NAME.fullmatch(name) is None:
            return None
        where = {} if namespace is None else {"namespace": namespace}
        try:
            return dict(await within(_REQUEST_S, self.client.get(kind, name, **where)))
        except ApiError as error:
            if code_of(error) == NOT_THERE:
                return None
            raise

    async def write_lease(self, namespace: str, name: str, lease: Object | None, spec: Object) -> Object:
        """Make a Lease, or write the one that was read, if nobody else has."""
        if lease is None:
            made = LEASES({"metadata": {"name": name, "namespace": namespace}, "spec": spec})
            return dict(await within(_REQUEST_S, self.client.create(made)))
        changed = LEASES({**lease, "spec": spec})
        return dict(await within(_REQUEST_S, self.client.replace(changed, name)))

    async def do(self, action: Action, raw: Object | None = None) -> None:
        """Carry an action out. ``raw``: the whole object of a `Report`. Raises one of `FAILURES` where that fails."""
        await within(2 * _REQUEST_S, self._DOES[type(action)](self, action, raw))

    async def _make(self, action: Make, _: Object | None) -> None:
        what = action.what
        await self.client.create(_MADE[what["kind"]](what))

    async def _end_pod(self, action: EndPod, _: Object | None) -> None:
        found = await self.client.get(PODS, action.name, namespace=action.namespace)
        if dict(found)["metadata"]["uid"] == action.uid:
            period = 0 if action.now else None
            await self.client.delete(PODS, action.name, namespace=action.namespace, grace_period=period)

    async def _report(self, action: Report, raw: Object | None) -> None:
        status = msgspec.to_builtins(action.status)
        written = JOBS.Status({**(raw or {}), "status": status})
        answer: Object = dict(await self.client.replace(written, action.name, namespace=action.namespace))
        if lost := status.keys() - (answer.get("status") or {}).keys():
            self._warn(
                f"the cluster's definition of {KIND} is older than this operator, and drops {', '.join(sorted(lost))} "
                "of the status: apply the newer one"
            )

    async def _mark(self, action: Mark, _: Object | None) -> None:
        now = _stamp()
        condition = {
            "type": action.condition,
            "status": "True",
            "reason": action.reason,
            "message": action.message,
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        await self._patch_conditions(action.node, condition)

    async def _unmark(self, action: Unmark, _: Object | None) -> None:
        await self._patch_conditions(action.node, {"$patch": "delete", "type": action.condition})

    async def _patch_conditions(self, node: str, condition: Object) -> None:
        change = {"status": {"conditions": [condition]}}  # merged by type: all others stay
        await self.client.patch(NODES.Status, node, change, patch_type=PatchType.STRATEGIC)

    async def _set_taints(self, action: SetTaints, _: Object | None) -> None:
        change: Object = {"spec": {"taints": [msgspec.to_builtins(one) for one in action.taints]}}
        if action.version:
            change["metadata"] = {"resourceVersion": action.version}
        await self.client.patch(NODES, action.node, change, patch_type=PatchType.MERGE)

    async def _note(self, action: Note, _: Object | None) -> None:
        meta = {"resourceVersion": action.version, "annotations": {action.annotation: action.value}}
        await self.client.patch(NODES, action.node, {"metadata": meta}, patch_type=PatchType.MERGE)

    async def _tell(self, action: Tell, _: Object | None) -> None:
        about, now = action.about, _stamp()
        digest = hashlib.sha256(f"{about} {action.reason} {action.message}".encode()).hexdigest()[:16]
        namespace = about.get("namespace") or "default"
        event = {
            "metadata": {"name": f"{about['name'][:200]}.{digest}", "namespace": namespace},
            "involvedObject": about,
            "reason": action.reason,
            "message": action.message[:1000],
            "type": "Warning" if action.is_warning else "Normal",
            "source": {"component": "keepstep-operator"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        await self.client.create(EVENTS(event), namespace=namespace)

    _DOES: ClassVar[Mapping[type, Callable[[Any, Any, Object | None], Awaitable[None]]]] = {
        Make: _make,
        EndPod: _end_pod,
        Report: _report,
        Mark: _mark,
        Unmark: _unmark,
        SetTaints: _set_taints,
        Note: _note,
        Tell: _tell,
    }


def plain(found: object) -> Object:
    """An object of the client library as plain JSON."""
    return dict(cast(Object, found))


def _stamp() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
