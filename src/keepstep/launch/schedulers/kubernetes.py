"""What Kubernetes says of a job in its pods, by the controller that made them.

TrainJob and PyTorchJob of Kubeflow set torchrun's ``PET_…``, which count as its flags. Volcano's and Kubeflow's older
plugins set ``MASTER_ADDR``, ``RANK`` and ``WORLD_SIZE`` of pods; an indexed Job, and so a JobSet, numbers its pods.

The first pod's name without its number is the job's id: a pod's address may be given to a pod of another job.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from keepstep.core.errors import UsageError
from keepstep.launch.schedulers.local import Allocation, host_in, number_in

MOST_PODS = 200_000
PORT = 29400  # each pod has an address of its own, so that jobs do not meet
_JOB = "Kubernetes job"
_INDEX = "JOB_COMPLETION_INDEX"
_VOLCANO_INDEX = "VC_TASK_INDEX"
_OF_PODS = ("MASTER_ADDR", "WORLD_SIZE", "RANK")
_NAMES = (
    "NODE_NAME",
    "MY_NODE_NAME",
    "K8S_NODE_NAME",
)  # customary names for spec.nodeName of the downward API


def is_pod(environ: Mapping[str, str]) -> bool:
    """Whether this process runs in a pod, by the variables that the kubelet sets in every container."""
    return bool(environ.get("KUBERNETES_SERVICE_HOST"))


def allocation_of(environ: Mapping[str, str], fqdn: str) -> Allocation | None:
    """What Kubernetes says in a pod; None elsewhere. ``fqdn``: the pod's name with its subdomain, from its hosts file.

    Raises UsageError for a variable of another form.
    """
    if not is_pod(environ) or "TORCHELASTIC_RUN_ID" in environ:
        return None
    node = next((environ[name] for name in _NAMES if environ.get(name)), "")
    if "PET_NNODES" in environ or "PET_NODE_RANK" in environ:
        master = environ.get("PET_MASTER_ADDR") or environ.get("PET_RDZV_ENDPOINT", "")
        return Allocation(
            name=_JOB,
            run_id=_stem(master.partition(":")[0].partition(".")[0], 0),
            node=node,
            untold="PET_NODE_RANK and PET_MASTER_ADDR are not set",
        )
    if all(environ.get(name, "").strip() for name in _OF_PODS):
        return _of_pods(environ, node)
    if environ.get(_VOLCANO_INDEX, "").strip():
        return _of_volcano(environ, node)
    index = number_in(environ, _INDEX, MOST_PODS)
    if index is not None:
        return _indexed(index, node, fqdn)
    empty = [name for name in (*_OF_PODS, _VOLCANO_INDEX, _INDEX) if not environ.get(name, "-").strip()]
    untold = f"{', '.join(empty)} is empty" if empty else f"{_INDEX} is not set"
    return Allocation(name=_JOB, node=node, untold=untold)


def _of_pods(environ: Mapping[str, str], node: str) -> Allocation:
    pods = number_in(environ, "WORLD_SIZE", MOST_PODS) or 0
    rank = number_in(environ, "RANK", MOST_PODS) or 0
    if rank >= pods:
        raise UsageError(f"RANK={rank} with WORLD_SIZE={pods}: a pod's rank is from 0 to WORLD_SIZE - 1")
    port = number_in(environ, "MASTER_PORT", 65535)
    if not port and "MASTER_PORT" in environ:
        raise UsageError(
            f"MASTER_PORT={environ['MASTER_PORT']!r}: is no number from 1 to 65535; correct it, or unset it"
        )
    master = host_in("MASTER_ADDR", environ["MASTER_ADDR"])
    return Allocation(
        name=_JOB,
        nodes=pods,
        node_rank=rank,
        master=master,
        port=port or PORT,
        run_id=_stem(master.partition(".")[0], 0),
        node=node,
    )


def _of_volcano(environ: Mapping[str, str], node: str) -> Allocation:
    """From the service plugin: each task of the job has its hosts in a variable; only a job of one task is known."""
    lists = [name for name in environ if re.fullmatch(r"VC_[A-Z0-9_]+_HOSTS", name)]
    if len(lists) != 1:
        return Allocation(name=_JOB, node=node, untold=f"of VC_…_HOSTS there are {len(lists)}, and not one")
    hosts = environ[lists[0]].split(",")
    index = number_in(environ, _VOLCANO_INDEX, MOST_PODS) or 0
    master = host_in(lists[0], hosts[0])
    if index >= len(hosts):
        raise UsageError(f"{_VOLCANO_INDEX}={index}: {lists[0]} names {len(hosts)} hosts only")
    return Allocation(
        name=_JOB,
        nodes=len(hosts),
        node_rank=index,
        master=master,
        port=PORT,
        run_id=_stem(master.partition(".")[0], 0),
        node=node,
    )


def _indexed(index: int, node: str, fqdn: str) -> Allocation:
    """A pod of an indexed Job is called JOB-INDEX; how many there are is not said."""
    host, dot, domain = fqdn.partition(".")
    stem = _stem(host, index)
    if not stem:
        untold = f"{_INDEX}={index}, and the pod's name is {host}, not NAME-{index}"
        return Allocation(name=_JOB, node_rank=index, node=node, untold=untold)
    return Allocation(
        name=f"{_JOB} {stem}",
        node_rank=index,
        master=f"{stem}-0{dot}{domain}",
        port=PORT,
        run_id=stem,
        node=node,
    )


def _stem(host: str, index: int) -> str:
    """The name of a pod without its index; empty where it does not end with that."""
    return host.removesuffix(f"-{index}") if host.endswith(f"-{index}") else ""
