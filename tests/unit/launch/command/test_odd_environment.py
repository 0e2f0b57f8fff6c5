"""Variables of schedulers and of torchrun with values that they never have: each is a line, whatever it holds."""

from __future__ import annotations

import itertools

import pytest

from keepstep.cli import main
from keepstep.core.errors import RunError, UsageError
from keepstep.launch.command import job as jobs
from keepstep.launch.command.addresses import resolve
from keepstep.launch.command.job import Job, job_from_command_line

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[0-4]",
    "SLURM_JOB_NODELIST": "n[0-4]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x5)",
    "SLURMD_NODENAME": "n2",
}
OF_SLURM = (
    *STEP,
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS",
    "SLURM_JOB_NUM_NODES",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_CPUS_PER_TASK",
    "SLURM_JOB_END_TIME",
    "SLURM_TOPOLOGY_ADDR",
    "SLURM_TOPOLOGY_ADDR_PATTERN",
)
OF_TORCHRUN = (
    "PET_NNODES",
    "PET_NODE_RANK",
    "PET_NPROC_PER_NODE",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_RDZV_BACKEND",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_CONF",
    "PET_RDZV_ID",
    "PET_MAX_RESTARTS",
    "PET_MONITOR_INTERVAL",
    "PET_STANDALONE",
    "PET_LOG_DIR",
    "PET_LOCAL_ADDR",
)
ODD = (
    "",
    " ",
    "-1",
    "0",
    "1e9",
    "9" * 5000,
    "a;b",
    "a\nb",
    "\x1b[31m",
    "n[1-",
    "n0 n1",
    "٣",
    "1:",
    ":1",
    "nan",
    "\udcff",
)


@pytest.mark.parametrize("name", [*OF_SLURM, *OF_TORCHRUN])
def test_an_odd_value_is_used_or_told_in_a_line(name: str) -> None:
    for value, meets in itertools.product(ODD, ({}, {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d"})):
        environ = {**STEP, **meets, name: value}
        try:
            made = job_from_command_line(["train.py"], environ)
        except UsageError:
            pass
        else:
            assert made.max_nodes >= 1


@pytest.mark.parametrize("name", OF_SLURM)
def test_in_an_allocation_too(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for known, value in STEP.items():
        monkeypatch.setenv(known, value)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4711")
    for value in ODD:
        monkeypatch.setenv(name, value)
        code = main(["slurm", "--dry-run", "--", "train.py"])
        shown = capsys.readouterr()
        if code:
            assert (code, shown.err.count("\n"), name in shown.err) == (2, 1, True), shown.err
        else:
            assert "None" not in shown.out


POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KEEPSTEP_NODE_NAME": "gpu-7"}
OF_PODS = {
    "Job": {"JOB_COMPLETION_INDEX": "1"},
    "TrainJob": {
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "train-node-0-0.train",
        "PET_MASTER_PORT": "29500",
    },
    "PyTorchJob, elastic": {
        "PET_NNODES": "3",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "train-worker-0:23456",
    },
    "Volcano, pytorch": {
        "MASTER_ADDR": "train-0.train",
        "MASTER_PORT": "23456",
        "WORLD_SIZE": "3",
        "RANK": "1",
    },
    "Volcano, svc": {"VC_TASK_INDEX": "1", "VC_NODE_HOSTS": "a-0.a,a-1.a,a-2.a"},
}


def parsed(monkeypatch: pytest.MonkeyPatch, *words: str, **environ: str) -> Job:
    monkeypatch.setattr(jobs, "own_name_with_domain", lambda: "train-1.train.ml.svc.cluster.local")
    return job_from_command_line([*words, "--max-restarts=1", "train.py"], {**POD, **environ})


def is_from(value: str, one: object) -> bool:
    """Whether a part of a meeting is a variable's, or the port of an endpoint that names none."""
    return str(one) in value or one == 29400 or (value.strip().isdecimal() and int(value) == one)


def made_or_told(monkeypatch: pytest.MonkeyPatch, *words: str, **environ: str) -> Job | str:
    try:
        return parsed(monkeypatch, *words, **environ)
    except UsageError as error:
        return str(error)


def meeting(job: Job) -> tuple[object, ...]:
    made = job.rendezvous
    assert made.endpoint is not None
    return job.max_nodes, made.endpoint.host, made.endpoint.port, made.node_rank, job.nproc, made.backend


@pytest.mark.parametrize(
    ("maker", "name"), [(maker, name) for maker, told in OF_PODS.items() for name in told], ids=str
)
def test_a_pods_variable_is_used_or_named(maker: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never is another value put in its place: a pod that takes itself for the first one waits for the others in vain.

    Nor is a host waited for that cannot be one.
    """
    told = OF_PODS[maker]
    nodes = [] if "PET_NNODES" in told else ["--nnodes=3"]
    usual = meeting(parsed(monkeypatch, *nodes, **told))
    for value in ODD:
        made = made_or_told(monkeypatch, *nodes, **{**told, name: value})
        if isinstance(made, str):
            assert name in made, (value, made)
        else:
            changed = [new for new, old in zip(meeting(made), usual, strict=True) if new != old]
            assert all(is_from(value, one) for one in changed), (value, made)
            assert changed or not value.strip(), (value, made)


def test_a_pod_whose_place_nobody_tells_is_no_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for told, why in (
        ({}, "JOB_COMPLETION_INDEX is not set"),
        ({"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX is empty"),
        ({"JOB_COMPLETION_INDEX": "2"}, "JOB_COMPLETION_INDEX=2, and the pod's name is train-1, not NAME-2"),
        ({"PET_NNODES": "3"}, "PET_NODE_RANK and PET_MASTER_ADDR are not set"),
        ({"VC_TASK_INDEX": "1"}, "of VC_…_HOSTS there are 0, and not one"),
    ):
        with pytest.raises(UsageError, match=why):
            parsed(monkeypatch, "--nnodes=3", **told)
        alone = {name: text for name, text in told.items() if name != "PET_NNODES"}
        assert parsed(monkeypatch, **alone).max_nodes == 1
        assert parsed(monkeypatch, "--nnodes=3", "--node-rank=1", "--master-addr=a", **told).max_nodes == 3


def test_the_command_line_is_named_where_it_has_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"^PET_NNODES='x': --nnodes x: "):
        parsed(monkeypatch, PET_NNODES="x")
    with pytest.raises(UsageError, match=r"^PET_NODE_RANK='x': run: argument --node-rank"):
        parsed(monkeypatch, PET_NODE_RANK="x")
    with pytest.raises(UsageError, match=r"^--nnodes y: "):
        parsed(monkeypatch, "--nnodes", "y", PET_NNODES="x")


@pytest.mark.parametrize("host", ["a..b", "9" * 5000, "\udcff", "a b", ""])
def test_a_host_that_cannot_be_looked_up_is_told(host: str) -> None:
    with pytest.raises(RunError, match="correct the host"):
        resolve(host)
