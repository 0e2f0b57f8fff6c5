import json
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep import __version__
from keepstep.cli import VERBS, main


def test_help_lists_every_verb_without_loading_it() -> None:
    code = (
        "import sys\nfrom keepstep.cli import main\n"
        "main(['--help'])\n"
        "print([m for m in ('torch', 'numpy', 'keepstep.cli.report') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert all(f"\n  {verb}" in done.stdout for verb in VERBS)


def test_version_and_unknown_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"keepstep {__version__}\n"
    assert main(["nonsense"]) == 2


def test_usage_errors_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nnodes", "x", "train.py"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("keepstep: --nnodes x")
    assert told.err.count("\n") == 1


def test_a_missing_script_is_named_before_anything_is_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--max-restarts", "3", "absent.py"]) == 2
    told = capsys.readouterr().err
    assert told == f"keepstep: absent.py: there is no such script, seen from {tmp_path}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "/no/such/run"]) == 2
    assert "/no/such/run" in capsys.readouterr().err


def test_dry_run_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--dry-run", "--nproc-per-node", "2", "--run-dir", "/nowhere/r", "t.py", "--dry-run"]
    assert main(words) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["run_dir"] == "/nowhere/r"
    assert [worker["environment"]["RANK"] for worker in plan["workers"]] == ["0", "1"]
    assert plan["workers"][0]["command"][-2:] == ["t.py", "--dry-run"]
    assert "keepstep.agent" in plan["agent"]
    assert main(["run", "--dry-run", "--no-watch", "t.py"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["agent"], plan["controller"]) == (None, None)
