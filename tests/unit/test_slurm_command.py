"""The command line of ``keepstep slurm``: whose flag is whose, and what sbatch is given."""

from __future__ import annotations

import pytest

from keepstep.cli.slurm import batch_script, main, split_flags
from keepstep.core.errors import UsageError


@pytest.mark.parametrize(
    ("words", "first", "rest"),
    [
        ("--nodes=4 -N4 train.py --nodes=9", "--nodes=4 -N4", "train.py --nodes=9"),
        ("--nodes=4 --nnodes 3 train.py x", "--nodes=4", "--nnodes 3 train.py x"),
        ("-t10 -- -t 3 train.py", "-t10", "-t 3 train.py"),
        ("train.py -- x", "", "train.py -- x"),
        (
            "--dry-run --requeue --node-remedy=auto -- train.py",
            "--dry-run --requeue --node-remedy=auto",
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
        ("--node-remedy train.py", "say off, advise or auto, after a ="),
    ],
)
def test_what_cannot_be_is_told(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        main(words.split())


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
    assert main(["--dry-run", "--", "--nnodes", "1", "train.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines] == [
        ["srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist=gpu-{number}"]
        for number in (1, 2)
    ]
