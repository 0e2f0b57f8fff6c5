"""The Service and the pods of a training job. Pure: a job in, manifests out."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from keepstep.kubernetes.objects import ATTEMPT, GROUP, INDEX, JOB, KIND, VERSION, TrainingJob
from keepstep.launch.schedulers.kubernetes import PORT

_HOST = "kubernetes.io/hostname"
_SECRET_FOLDER = "/etc/keepstep"
_VOLUME = "keepstep-secret"
JOIN_S = 3600
"""Launchers wait for others so long, as pods may wait for a place on a node."""

Object = dict[str, Any]


def pod_name(job: TrainingJob, index: int) -> str:
    """The name of a pod, which is also its host name. Two pods of one index are impossible so."""
    return f"{job.metadata.name}-{index}"


def service_of(job: TrainingJob) -> Object:
    """The headless Service by which the first pod is found."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**_owned(job), "name": job.metadata.name, "labels": {JOB: job.metadata.name}},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the first pod's name is known as soon as it has an address
            "selector": {JOB: job.metadata.name},
            "ports": [{"name": "keepstep", "port": PORT}],
        },
    }


def pod_of(job: TrainingJob, index: int) -> Object:
    """The pod of an index, from the job's template."""
    spec, name = job.spec, job.metadata.name
    template = copy.deepcopy(spec.template)
    given: Object = template.get("metadata") or {}
    pod: Object = template.get("spec") or {}
    labels = {JOB: name, INDEX: str(index), ATTEMPT: str(job.status.attempt)}
    pod |= {"hostname": pod_name(job, index), "subdomain": name, "restartPolicy": "Never"}
    _keep_apart(pod, name)
    _keep_from(pod, {*spec.excluded_nodes, *job.status.excluded_nodes}, job.status.avoided_nodes)
    containers: list[Object] = pod.get("containers") or []
    if containers:
        _add_environment(containers[0], index, spec.nodes)
        _mount_secret(pod, containers[0], spec.secret_name)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **_owned(job),
            "name": pod_name(job, index),
            "labels": {**(given.get("labels") or {}), **labels},
            "annotations": given.get("annotations") or {},
        },
        "spec": pod,
    }


def _owned(job: TrainingJob) -> Object:
    owner = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
    return {"namespace": job.metadata.namespace, "ownerReferences": [owner]}


def _part(of: Object, *path: str) -> Object:
    """An object within another one, which is made where it is not there."""
    for key in path:
        if not isinstance(of.get(key), dict):
            of[key] = {}
        of = of[key]
    return of


def _keep_apart(pod: Object, name: str) -> None:
    """No two pods of a job on one node: both would be lost with it, and GPUs be shared."""
    anti = _part(pod, "affinity", "podAntiAffinity")
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    anti[key] = [
        *(anti.get(key) or []),
        {"labelSelector": {"matchLabels": {JOB: name}}, "topologyKey": _HOST},
    ]


def _keep_from(pod: Object, excluded: Collection[str], avoided: Collection[str]) -> None:
    if excluded:
        required = _part(pod, "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
        # Of the terms any one has to fit, and all requirements of a term.
        terms: list[Object] = required.get("nodeSelectorTerms") or [{}]
        required["nodeSelectorTerms"] = [
            {**term, "matchFields": [*(term.get("matchFields") or []), *map(_is_not, sorted(excluded))]}
            for term in terms
        ]
    if avoided:
        affinity, key = (
            _part(pod, "affinity", "nodeAffinity"),
            "preferredDuringSchedulingIgnoredDuringExecution",
        )
        others = {"matchFields": [_is_not(name) for name in sorted(avoided)]}
        affinity[key] = [*(affinity.get(key) or []), {"weight": 100, "preference": others}]


def _is_not(node: str) -> Object:
    # Kubernetes takes one value only in a requirement on this field.
    return {"key": "metadata.name", "operator": "NotIn", "values": [node]}


def _add_environment(container: Object, index: int, nodes: int) -> None:
    env: list[Object] = container.get("env") or []
    own: list[Object] = [
        {"name": "JOB_COMPLETION_INDEX", "value": str(index)},
        {"name": "KEEPSTEP_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "TRAINING_JOB_NODES", "value": str(nodes)},
    ]
    taken = {one["name"] for one in own}
    kept = [one for one in env if one.get("name") not in taken]
    if not any(one.get("name") == "KEEPSTEP_JOIN_TIMEOUT_S" for one in kept):
        own.append({"name": "KEEPSTEP_JOIN_TIMEOUT_S", "value": str(JOIN_S)})
    container["env"] = [*own, *kept]  # first, as later ones may refer to them
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")


def _mount_secret(pod: Object, container: Object, name: str) -> None:
    """Mount the job's secret where the template does not."""
    volumes: list[Object] = pod.get("volumes") or []
    mounts: list[Object] = container.get("volumeMounts") or []
    secrets: list[Object] = [one.get("secret") or {} for one in volumes]
    mounted = any(one.get("secretName") == name for one in secrets)
    if mounted or any(one.get("mountPath") == _SECRET_FOLDER for one in mounts):
        return
    pod["volumes"] = [*volumes, {"name": _VOLUME, "secret": {"secretName": name, "defaultMode": 0o440}}]
    container["volumeMounts"] = [
        *mounts,
        {"name": _VOLUME, "mountPath": _SECRET_FOLDER, "readOnly": True},
    ]
    env: list[Object] = container["env"]
    if not any(one.get("name") == "KEEPSTEP_SECRET_FILE" for one in env):
        env.append({"name": "KEEPSTEP_SECRET_FILE", "value": f"{_SECRET_FOLDER}/secret"})
