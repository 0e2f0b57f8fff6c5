"""Variables of Slurm's and torchrun's with values that they never have: each is a line, whatever it holds."""

from __future__ import annotations

import itertools

import pytest

from keepstep.cli import main
from keepstep.core.errors import UsageError
from keepstep.launch.command.job import job_from_command_line

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
