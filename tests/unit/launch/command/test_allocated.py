"""What the scheduler says fills in for flags that nobody gave; what contradicts is told."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.core.errors import UsageError
from keepstep.launch.command.job import Job, job_from_command_line

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[0-4]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x5)",
    "SLURMD_NODENAME": "n2",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def job(*argv: str, **environ: str) -> Job:
    return job_from_command_line([*argv, "train.py"], {**STEP, **environ})


def meeting(made: Job) -> tuple[Any, ...]:
    return made.max_nodes, str(made.rendezvous.endpoint), made.rendezvous.node_rank, made.run_id


def test_without_flags_slurm_says_how_nodes_meet() -> None:
    made = job(SLURM_GPUS_ON_NODE="8")
    assert meeting(made) == (5, "n0:24711", 2, "4711")
    assert (made.nproc, made.node, made.rendezvous.backend) == (8, "n2", "static")


def test_nodes_beyond_nnodes_are_spares_with_restarts() -> None:
    made = job("--nnodes", "2", "--max-restarts", "3")
    assert meeting(made) == (2, "n0:24711", 2, "4711"), "rank 2 of 2: a spare"
    with pytest.raises(UsageError, match="with --max-restarts N the others are spares"):
        job("--nnodes", "2")


def test_more_nodes_than_there_are_cannot_be() -> None:
    with pytest.raises(UsageError, match="--nnodes 8: Slurm job 4711 has 5 here"):
        job("--nnodes", "8")
    with pytest.raises(UsageError, match="--nnodes 6:8"):
        job("--nnodes", "6:8")
    assert job("--nnodes", "4:8").max_nodes == 8


@pytest.mark.parametrize(
    ("flags", "endpoint", "rank"),
    [
        (("--nnodes=3", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1"), "h:1", -1),
        (("--nnodes=3", "--node-rank=1", "--master-addr=h", "--master-port=2"), "h:2", 1),
        (("--standalone",), "None", 0),
    ],
)
def test_flags_that_say_how_nodes_meet_win(flags: tuple[str, ...], endpoint: str, rank: int) -> None:
    made = job(*flags)
    assert (str(made.rendezvous.endpoint), made.rendezvous.node_rank) == (endpoint, rank)
    assert made.node == "n2", "its name is Slurm's all the same"


def test_torchruns_variables_are_flags() -> None:
    made = job(PET_NNODES="3", PET_NODE_RANK="1", PET_MASTER_ADDR="h", PET_MASTER_PORT="29500")
    assert meeting(made) == (3, "h:29500", 1, "none")
    assert job("--nproc-per-node=1", SLURM_GPUS_ON_NODE="8").nproc == 1
    assert job(PET_NPROC_PER_NODE="2", SLURM_GPUS_ON_NODE="8").nproc == 2


def test_flags_that_contradict_slurm_hold_and_it_is_said() -> None:
    meet = ("--nnodes=5", "--master-addr=h", "--master-port=2")
    made = job("--node-rank=1", *meet)
    assert made.warnings == ("--node-rank 1: by Slurm job 4711 this is node 2 of 5; the flag holds",)
    assert job(*meet, PET_NODE_RANK="0").rendezvous.node_rank == 0
    assert job("--node-rank=2", *meet).warnings == ()
    (line,) = job("--node-rank=1", "--nnodes=5", "--rdzv-backend=c10d", "--rdzv-endpoint=h:1").warnings
    assert line.startswith("--node-rank 1 has no effect with --rdzv-backend c10d"), "the flag does not hold"
    first = {"SLURMD_NODENAME": "n0", "SLURM_GPUS_ON_NODE": "8"}
    made = job("--nproc-per-node=4", **first)
    said = "--nproc-per-node 4: Slurm job 4711 has 8 GPUs on this node; the flag holds"
    assert (made.nproc, made.warnings) == (4, (said,))
    assert job(PET_NPROC_PER_NODE="4", **first).warnings == (said,)
    assert job("--nproc-per-node=4", SLURM_GPUS_ON_NODE="8").warnings == (), "the first node says it for all"
    for agreed in ("8", "08", "cpu"):
        assert job(f"--nproc-per-node={agreed}", **first).warnings == ()


def test_one_node_is_a_job_of_one_node() -> None:
    made = job(SLURM_STEP_NODELIST="n2", SLURM_STEP_TASKS_PER_NODE="1")
    assert (made.max_nodes, made.rendezvous.endpoint, made.master_addr) == (1, None, "127.0.0.1")


def test_a_variable_that_cannot_be_read_is_an_error_only_where_it_is_needed() -> None:
    with pytest.raises(UsageError, match="SLURM_STEP_NODELIST='n\\[0-'"):
        job(SLURM_STEP_NODELIST="n[0-")
    made = job("--nnodes=3", "--node-rank=1", "--master-addr=h", SLURM_STEP_NODELIST="n[0-")
    assert "not needed, as flags say how the nodes meet" in made.warnings[0]


def test_pods_of_an_indexed_job_need_nnodes() -> None:
    pod = {**POD, "JOB_COMPLETION_INDEX": "1", "NODE_NAME": "gpu-7"}
    alone = job_from_command_line(["train.py"], pod)
    assert (alone.max_nodes, alone.node) == (1, "gpu-7"), "its pods may be jobs of their own"


def test_pods_of_volcano_need_none() -> None:
    pod = {**POD, "MASTER_ADDR": "m-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": "1"}
    made = job_from_command_line(["train.py"], pod)
    assert (made.max_nodes, str(made.rendezvous.endpoint), made.rendezvous.node_rank) == (2, "m-0:23456", 1)
