"""The command line of ``keepstep slurm``: whose flag is whose, and what sbatch is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from keepstep.cli.slurm import batch_script, main, split_flags
from keepstep.core.errors import UsageError
from keepstep.core.incident import Culprit, FailureCause, Incident, SpokenLine
from keepstep.report.incidents import incident_to_json

XID = "NVRM: Xid (PCI:0000:9b:00): 95, pid=4711, name=python3, Uncontained ECC error"
ECC = FailureCause(
    *("node", "gpu-ecc", "GPU memory error", "high"),
    first=SpokenLine(XID, None, "n1", "kernel"),
)


@pytest.mark.parametrize(
    ("words", "first", "rest"),
    [
        ("--nodes=4 -N4 train.py --nodes=9", "--nodes=4 -N4", "train.py --nodes=9"),
        ("--nodes=4 --nnodes 3 train.py x", "--nodes=4", "--nnodes 3 train.py x"),
        ("-t10 -- -t 3 train.py", "-t10", "-t 3 train.py"),
        ("train.py -- x", "", "train.py -- x"),
        (
            "--dry-run --srun=--container-image=x --python=python3 -- train.py",
            "--dry-run --srun=--container-image=x --python=python3",
            "train.py",
        ),
    ],
)
def test_flags_of_sbatch_come_first(words: str, first: str, rest: str) -> None:
    assert split_flags(words.split(), {}) == (first.split(), rest.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nodes 4 train.py", "write sbatch's flags in one word, --nodes=4"),
        ("--nodes=4", "there is no script"),
        ("--node-remedy=always train.py", "--node-remedy=always: say off, advise or auto"),
        ("--srun train.py", "--srun: its value comes in the same word, after a ="),
        ("--python='x train.py", "--python='x: No closing quotation"),
        ("--node-remedy train.py", "--node-remedy: its value comes in the same word"),
    ],
)
def test_what_cannot_be_is_told(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        main(words.split())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("drain_command", "report '{node}", "No closing quotation"),
        ("node_remedy", "always", "say off, advise or auto"),
    ],
)
def test_what_a_site_has_set_and_cannot_be_is_told_with_where_it_stands(
    name: str, value: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    variable, config = f"KEEPSTEP_{name.upper()}", tmp_path / "site.toml"
    config.write_text(f'[run]\n{name} = "{value}"\n')
    monkeypatch.setenv("KEEPSTEP_CONFIG", str(config))
    with pytest.raises(UsageError) as error:
        main(["train.py"])
    assert str(error.value) == f"{config}: run.{name} = {value}: {said}"
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError) as error:
        main(["train.py"])
    assert str(error.value) == f"{variable}={value}: {said}"


@pytest.mark.parametrize("by", ["file", "environment"])
def test_a_site_says_what_is_done_about_bad_nodes_and_how(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The job's only step reports a broken node; the site's command is given it, without a shell."""
    site, log, run = tmp_path / "site tool", tmp_path / "log", tmp_path / "run"
    (run / "incidents").mkdir(parents=True)
    crash = Incident(1, "crash", 3, 3, None, None, (Culprit(rank=1, node="n1"),), (), (), (), cause=ECC)
    (tmp_path / "incident").write_bytes(incident_to_json(crash))
    for name, text in (
        ("site tool", f'printf "%s|" "$@" > {log}'),
        ("scontrol", '[ "$1" = show ] && echo "NodeName=$3 State=ALLOCATED"'),
        ("squeue", "true"),
        ("srun", f"cp {tmp_path}/incident {run}/incidents/0001.json; exit 2"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    command = f"'{site}' --node {{node}} '$HOME; {{reason}}'"
    if by == "file":
        (tmp_path / "site.toml").write_text(f'[run]\nnode_remedy = "auto"\ndrain_command = "{command}"\n')
        monkeypatch.setenv("KEEPSTEP_CONFIG", str(tmp_path / "site.toml"))
    else:
        monkeypatch.setenv("KEEPSTEP_NODE_REMEDY", "auto")
        monkeypatch.setenv("KEEPSTEP_DRAIN_COMMAND", command)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    assert main(["--", "--run-dir", str(run), "train.py"]) == 2
    reason = "[node_problem] keepstep run=12 incident=0001 rank=1 GPU memory error"
    assert log.read_text() == f"--node|n1|$HOME; {reason}|"
    assert f"keepstep: drained n1: {reason}\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (None, "sbatch: cannot be started: No such file or directory; run this where Slurm's programs are"),
        ("sleep 60", "sbatch: has not answered for 0 s; is slurmctld away?"),
        ("echo 'Access/permission denied' >&2; exit 1", "sbatch refuses the job: Access/permission denied"),
        (r"printf 'a\n\033[31mb' >&2; exit 1", r"sbatch refuses the job: a\n\x1b[31mb"),
    ],
)
def test_why_a_job_is_not_submitted_is_a_line(
    program: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("keepstep.cli.slurm._PATIENCE_S", 0.3)
    monkeypatch.setenv("PATH", str(tmp_path))
    if program is not None:
        (tmp_path / "sbatch").write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin; exec 3<&0; {program}\n")
        (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(UsageError) as error:
        main(["train.py"])
    assert str(error.value) == said


def test_sbatch_is_waited_for_where_it_waits_for_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr("keepstep.cli.slurm._PATIENCE_S", 0.0)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 7; sleep 0.2; exit 75\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert main(["--wait", "train.py"]) == 75
    assert capfd.readouterr().out == "Submitted batch job 7\n"


def test_a_jobs_name_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["--dry-run", "--", "a;b\n\x1b[31m.py"]) == 0
    assert capsys.readouterr().out.startswith(r"# sbatch '--job-name=a;b\n\x1b[31m' --no-kill ")


def test_the_batch_script_quotes_what_it_passes_on() -> None:
    script = batch_script(["--requeue", "--dry-run"], ["train.py", "a b", "$HOME", "it's"])
    assert script.endswith("""keepstep.cli slurm --requeue -- train.py 'a b' '$HOME' 'it'"'"'s'\n""")
    assert script.startswith("#!/bin/sh\nexec ")


def test_within_a_job_sbatchs_flags_have_no_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with pytest.raises(UsageError, match="--nodes=4: flags of sbatch have no meaning within job 12"):
        main(["--nodes=4", "train.py"])


def test_the_steps_can_be_seen_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu-[1-2]")
    assert main(["--dry-run", "--requeue", "--", "--nnodes", "1", "train.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines[:2]] == [
        ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist=gpu-{number}"]
        for number in (1, 2)
    ]
    assert [line.partition(": ")[2] for line in lines[2:]] == [
        "scontrol update 'NodeName={node}' State=DRAIN 'Reason={reason}'",
        "scontrol update JobId=12 NodeList={other nodes}",
        "scontrol update JobId=12 Comment={verdict}",
        "scontrol requeue 12; scontrol update JobId=12 ExcNodeList={bad nodes} StartTime=now+15seconds",
    ]
    assert all(line.startswith("# ") for line in lines[2:]), "the output may be run as a script"
