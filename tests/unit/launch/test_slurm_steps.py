"""The exit code of a job of several steps, with a stand-in for srun."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from keepstep.core.errors import UsageError
from keepstep.launch.slurm_orders import SlurmOrders
from keepstep.launch.slurm_steps import SlurmSteps


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmSteps:
    end = {"exit_code": 3, "ended_unix_s": time.time() + 60}
    (tmp_path / "end.json").write_text(json.dumps(end))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    said: list[str] = []
    orders = SlurmOrders("12", ["n0"], tmp_path, "off", said.append)
    environ = {
        **os.environ,
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_NODELIST": "n0",
        "SLURM_GPUS": "2",
        "SLURM_GPUS_ON_NODE": "2",
    }
    return SlurmSteps(["true"], tmp_path, 0, environ, orders, said.append)


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        ("""echo '{"exit_code": 75, "ended_unix_s": 1}' > "${0%/*}/end.json"; exit 1""", 75),
    ],
)
def test_an_end_of_an_earlier_run_counts_not_whatever_clocks_say(
    steps: SlurmSteps, tmp_path: Path, does: str, code: int
) -> None:
    program(tmp_path / "srun", does)
    assert asyncio.run(steps.run()) == code


def test_the_jobs_comment_tells_its_end_and_not_that_of_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path / "scontrol", f'[ "$1" = show ] || echo "$3" >> {tmp_path}/log')
    environ = {**os.environ, "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n0"}
    orders = SlurmOrders("12", ["n0"], tmp_path, "advise", print)
    earlier = {"exit_code": 75, "ended_unix_s": 1, "category": "infrastructure", "reason": "lost"}
    (tmp_path / "end.json").write_text(json.dumps(earlier))
    program(tmp_path / "srun", "exit 0")
    asyncio.run(SlurmSteps(["true"], tmp_path, 0, environ, orders, print).run())
    assert not (tmp_path / "log").exists()
    now = {"exit_code": 7, "ended_unix_s": 2, "category": "training", "reason": "rank 0 failed"}
    program(tmp_path / "srun", f"echo '{json.dumps(now)}' > {tmp_path}/end.json; exit 7")
    assert asyncio.run(SlurmSteps(["true"], tmp_path, 0, environ, orders, print).run()) == 7
    said = "Comment=[keepstep] run=12 exit=7 (training) rank 0 failed"
    assert (tmp_path / "log").read_text().splitlines() == [said]


@pytest.mark.parametrize(("times", "begun"), [(2, ["n0", "n1", "n0", "n1"]), (1, ["n0", "n1"])])
def test_a_launcher_that_a_new_run_has_left_behind_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, begun: list[str]
) -> None:
    """The first launcher is killed once, or not; that of n1 ends with 75 in its first run."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("keepstep.launch.slurm_steps._LAST_WORDS_S", 0.1)
    program(
        tmp_path / "srun",
        f"""cd {tmp_path}
for word; do case $word in --nodelist=*) node=${{word#*=}};; esac; done
if [ $node = n1 ]; then while [ ! -s begun ]; do sleep 0.1; done; fi
echo $node >> begun
runs=$(grep -c n0 begun)
case $node$runs in
  n01) if [ {times} = 2 ]; then while ! grep -q n1 begun; do sleep 0.1; done; kill -9 $$; fi;;
  n02) while [ $(grep -c n1 begun) != 2 ]; do sleep 0.1; done; exit 0;;
  n11) if [ {times} = 2 ]; then while [ $(grep -c n0 begun) != 2 ]; do sleep 0.1; done; fi; exit 75;;
esac""",
    )
    said: list[str] = []
    environ = {**os.environ, "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[0-1]"}
    orders = SlurmOrders("12", ["n0", "n1"], tmp_path, "off", said.append)
    asyncio.run(SlurmSteps(["true"], tmp_path, 3, environ, orders, said.append).run())
    assert (tmp_path / "begun").read_text().split() == begun
    assert sum("it is started again" in line for line in said) == len(begun) - 2


def test_launchers_are_told_the_end_of_the_jobs_time(steps: SlurmSteps, tmp_path: Path) -> None:
    program(tmp_path / "squeue", "echo 2026-01-02T03:04:05")
    program(tmp_path / "srun", """[ "$SLURM_JOB_END_TIME" = "$(date -d 2026-01-02T03:04:05 +%s)" ]""")
    assert asyncio.run(steps.run()) == 0


def test_a_step_takes_its_nodes_share_of_the_jobs_gpus(steps: SlurmSteps, tmp_path: Path) -> None:
    assert "--gpus-per-node=2" in steps.command("n0")
    program(tmp_path / "srun", """[ -z "$SLURM_GPUS" ]""")
    assert asyncio.run(steps.run()) == 0


def test_each_step_has_the_users_flags_of_srun(tmp_path: Path) -> None:
    orders = SlurmOrders("12", ["n0"], tmp_path, "off", print)
    environ = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n0"}
    steps = SlurmSteps(["true"], tmp_path, 0, environ, orders, print, srun_flags=["--container-image=a b"])
    assert steps.command("n0")[-2:] == ["--container-image=a b", "true"]


def test_without_srun_it_is_said(tmp_path: Path) -> None:
    orders = SlurmOrders("12", ["n0"], tmp_path, "off", print)
    environ = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n0", "PATH": str(tmp_path)}
    steps = SlurmSteps(["true"], tmp_path, 0, environ, orders, print)
    with pytest.raises(UsageError, match="srun: cannot be started: No such file or directory; it comes with"):
        asyncio.run(steps.run())


def test_gpus_that_are_spread_unevenly_are_told(tmp_path: Path) -> None:
    said: list[str] = []
    orders = SlurmOrders("12", ["n0", "n1"], tmp_path, "off", said.append)
    environ = {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_GPUS_ON_NODE": "3"}
    SlurmSteps(["true"], tmp_path, 0, {**environ, "SLURM_GPUS": "a100:6"}, orders, said.append)
    with pytest.raises(
        UsageError, match=r"--gpus=4: .* unevenly over 2 nodes, 3 are here; say --gpus-per-node"
    ):
        SlurmSteps(["true"], tmp_path, 0, {**environ, "SLURM_GPUS": "4"}, orders, said.append)
