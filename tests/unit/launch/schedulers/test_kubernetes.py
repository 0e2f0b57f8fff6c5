"""What is read from a pod's environment, by the kind of controller that made the pod."""

from __future__ import annotations

import pytest

from keepstep.core.errors import UsageError
from keepstep.launch.schedulers.kubernetes import allocation_of

POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "NODE_NAME": "gpu-7"}


def test_elsewhere_nothing_is_said() -> None:
    assert allocation_of({"JOB_COMPLETION_INDEX": "1"}, "a-1") is None
    assert allocation_of({**POD, "TORCHELASTIC_RUN_ID": "x"}, "a-1") is None, "a worker of a launcher"


def test_torchruns_variables_are_flags_and_only_the_node_is_named() -> None:
    told = allocation_of({**POD, "PET_NNODES": "4", "PET_NODE_RANK": "1", "JOB_COMPLETION_INDEX": "1"}, "a-1")
    assert told is not None
    assert (told.nodes, told.node_rank, told.master, told.node) == (0, -1, "", "gpu-7")


@pytest.mark.parametrize(
    ("variable", "value", "run_id"),
    [
        ("PET_MASTER_ADDR", "train-node-0-0.train", "train-node-0"),  # TrainJob
        ("PET_MASTER_ADDR", "train-master-0", "train-master"),  # PyTorchJob
        ("PET_RDZV_ENDPOINT", "train-worker-0:23456", "train-worker"),  # PyTorchJob with elasticPolicy
        ("PET_MASTER_ADDR", "10.0.0.1", ""),
    ],
)
def test_the_first_pods_name_tells_the_job_from_others(variable: str, value: str, run_id: str) -> None:
    told = allocation_of({**POD, "PET_NNODES": "4", variable: value}, "a-1")
    assert told is not None
    assert told.run_id == run_id


def test_pods_of_pytorchjob_and_volcano_know_their_master() -> None:
    env = {**POD, "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "4", "RANK": "3"}
    told = allocation_of(env, "job-worker-2")
    assert told is not None
    assert (told.nodes, told.node_rank, told.master, told.port) == (4, 3, "job-master-0", 23456)
    with pytest.raises(UsageError, match="RANK=4 with WORLD_SIZE=4"):
        allocation_of({**env, "RANK": "4"}, "job-worker-2")


def test_volcanos_service_plugin_lists_the_hosts() -> None:
    env = {
        **POD,
        "VC_TASK_INDEX": "1",
        "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
        "VC_WORKER_NUM": "2",
    }
    told = allocation_of(env, "job-worker-1")
    assert told is not None
    assert (told.nodes, told.node_rank, told.master, told.run_id) == (2, 1, "job-worker-0.job", "job-worker")
    with pytest.raises(UsageError, match="VC_TASK_INDEX=2"):
        allocation_of({**env, "VC_TASK_INDEX": "2"}, "job-worker-1")
    several = allocation_of({**env, "VC_MASTER_HOSTS": "job-master-0.job"}, "job-worker-1")
    assert several is not None
    assert several.node_rank == -1, "ranks over two tasks are not said"


@pytest.mark.parametrize(
    ("fqdn", "master", "run_id"),
    [
        ("train-3.train.ml.svc.cluster.local", "train-0.train.ml.svc.cluster.local", "train"),
        ("js-workers-0-3.js.ml.svc.cluster.local", "js-workers-0-0.js.ml.svc.cluster.local", "js-workers-0"),
        ("train-3", "train-0", "train"),
        ("renamed", "", ""),
    ],
)
def test_a_pod_of_an_indexed_job_finds_the_first_by_its_name(fqdn: str, master: str, run_id: str) -> None:
    told = allocation_of({**POD, "JOB_COMPLETION_INDEX": "3"}, fqdn)
    assert told is not None
    assert (told.nodes, told.node_rank, told.master, told.run_id) == (0, 3, master, run_id)


def test_an_index_of_another_form_is_named() -> None:
    with pytest.raises(UsageError, match="JOB_COMPLETION_INDEX"):
        allocation_of({**POD, "JOB_COMPLETION_INDEX": "first"}, "train-3")
