"""A stand-in for the controller of an indexed Job, which Kubernetes 1.20 does not have: it makes the Job's pods.

They are made from ``deploy/kubernetes/job.yaml`` as it is, but for the command's numbers, script and volume. A pod that
is gone is made anew, and one that has ended by the manifest's own rules (``podFailurePolicy``, ``backoffLimit``). Where
these fail the job nothing is made any more; the pods that run are left to themselves.
"""

from __future__ import annotations

import copy
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from tests.e2e.kube_api import ApiError, KubeApi, Object

_MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes/job.yaml"
_LABEL, _INDEX = "batch.kubernetes.io/job-name", "batch.kubernetes.io/job-completion-index"
SHARED = "/run/shared"
_LOOK_S = 0.2
PODS = "/api/v1/namespaces/default/pods"


class StandInJob:
    """Pods of one indexed Job.

    ``shared``: a folder that all of them see as ``SHARED``; ``labels`` and ``annotations``: further ones of theirs.
    """

    def __init__(
        self,
        api: KubeApi,
        pods: int,
        words: Sequence[str],
        shared: Path,
        *,
        name: str = "train",
        labels: Mapping[str, str] | None = None,
        annotations: Mapping[str, str] | None = None,
        has_secret: bool = False,
    ) -> None:
        self._api, self.count, self.name = api, pods, name
        self._labels, self._annotations = dict(labels or {}), dict(annotations or {})
        service, manifest = yaml.safe_load_all(_MANIFEST.read_text())
        self._spec = manifest["spec"]
        self.has_failed = False
        self.template = template_of(words, shared)
        (main,) = self.template["spec"]["containers"]
        annotation = f"metadata.annotations['{_INDEX}']"
        main["env"].append(
            {"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": annotation}}}
        )
        self.template["spec"]["subdomain"] = name
        service["metadata"]["name"] = name
        service["spec"]["selector"] = {_LABEL: name}
        if not has_secret:
            make_secret(api)
        api.post("/api/v1/namespaces/default/services", service)
        self._over = threading.Event()
        for index in range(pods):
            self.make(index)

    def make(self, index: int) -> None:
        """Make the pod of an index."""
        spec = copy.deepcopy(self.template["spec"])
        spec["hostname"] = f"{self.name}-{index}"
        meta = {
            "name": f"{self.name}-{index}-{secrets.token_hex(3)[:5]}",
            "labels": {**self._labels, _LABEL: self.name, _INDEX: str(index)},
            "annotations": {**self._annotations, _INDEX: str(index)},
        }
        self._api.post(PODS, {"metadata": meta, "spec": spec})

    def pods(self) -> list[Object]:
        found = self._api.get(PODS, labelSelector=f"{_LABEL}={self.name}")["items"]
        return sorted(found, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def pod(self, index: int) -> Object:
        """The newest pod of an index."""
        return [one for one in self.pods() if index_of(one) == index][-1]

    def follow(self) -> None:
        """Look again and again from now on, until ``stop``."""
        threading.Thread(target=self._follow, daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def look(self) -> None:
        """Do what the job's rules say of the pods that there are now."""
        pods = self.pods()
        actions = [
            action_on(self._spec["podFailurePolicy"], code) for one in pods if (code := exit_code(one))
        ]
        self.has_failed = "FailJob" in actions or actions.count("Count") > self._spec["backoffLimit"]
        for index in range(self.count):
            if not self.has_failed and all(exit_code(one) for one in pods if index_of(one) == index):
                self.make(index)

    def exit_codes(self) -> dict[str, int]:
        """By the pod's name, of those that have ended and are still there."""
        return {pod["metadata"]["name"]: code for pod in self.pods() if (code := exit_code(pod)) is not None}

    def _follow(self) -> None:
        while not self._over.wait(_LOOK_S):
            with suppress(ApiError, OSError):
                self.look()


def template_of(words: Sequence[str], shared: Path) -> Object:
    """The pod template of ``job.yaml``, with other words after ``keepstep run``.

    A folder is seen as ``SHARED`` in all pods, and the kernel's log is that of the node.
    """
    _, job = yaml.safe_load_all(_MANIFEST.read_text())
    template = job["spec"]["template"]
    (main,) = template["spec"]["containers"]
    main["command"], main["args"] = ["python", "-m", "keepstep.cli", "run"], list(words)
    main["volumeMounts"].append({"name": "shared", "mountPath": SHARED})
    main["volumeMounts"].append({"name": "kmsg", "mountPath": "/dev/kmsg", "readOnly": True})
    template["spec"]["volumes"].append({"name": "shared", "hostPath": {"path": str(shared)}})
    template["spec"]["volumes"].append({"name": "kmsg", "hostPath": {"path": "/dev/kmsg"}})
    return template


def make_secret(api: KubeApi) -> None:
    """Make the secret that pods share."""
    secret = {"metadata": {"name": "keepstep"}, "stringData": {"secret": secrets.token_hex(32)}}
    api.post("/api/v1/namespaces/default/secrets", secret)


def action_on(policy: Object, code: int) -> str:
    """What a ``podFailurePolicy`` says of an exit code other than 0: its first rule that fits, else ``Count``."""
    for rule in policy["rules"]:
        codes = rule.get("onExitCodes")
        if codes is not None and (code in codes["values"]) == (codes["operator"] == "In"):
            return rule["action"]
    return "Count"


def index_of(pod: Object) -> int:
    return int(pod["metadata"]["labels"][_INDEX])


def exit_code(pod: Object) -> int | None:
    """Of a pod whose command has ended."""
    for one in pod["status"].get("containerStatuses", []):
        ended: dict[str, Any] | None = one["state"].get("terminated")
        if ended is not None:
            return ended["exitCode"]
    return None
