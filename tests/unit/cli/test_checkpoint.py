"""`keepstep checkpoint list|verify|export|prune`: output, exit codes, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.unit.checkpoint.stored_states import sample_state, taken

from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.storage.backend import LocalStorage
from keepstep.checkpoint.storage.persist import conclude, write_shard
from keepstep.cli import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    storage = LocalStorage(tmp_path / "run")
    for step in (10, 20, 30):
        header, data = taken(sample_state(step), step, incarnation=step // 20)
        write_shard(storage, header, memoryview(data))
        if step != 30:
            conclude(storage, Key(step // 20, step), [0], 1, leader=True)
    return tmp_path / "run"


def checkpoint(*words: object) -> int:
    return main(["checkpoint", *map(str, words)])


def test_list(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint("list", run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["STEP", "30", "20", "10"]
    assert lines[1].endswith("step-0000000030-i0001: has no manifest, it was not written to the end")
    assert lines[2].split()[1:3] == ["1", "1"]
    assert lines[2].endswith("whole")
    assert checkpoint("list", run, "--json") == 0
    assert [one["whole"] for one in json.loads(capsys.readouterr().out)] == [False, True, True]
    assert checkpoint("list", run / "nowhere") == 0
    assert "no checkpoint there" in capsys.readouterr().err


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint("verify", run, "--step", 20) == 0
    assert capsys.readouterr().out.startswith("step 20 (incarnation 1): ")
    damaged = run / "step-0000000010-i0000" / "rank-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    assert checkpoint("verify", run) == 1
    told = capsys.readouterr().out
    assert (
        "step 10 (incarnation 0): DAMAGED\n  step-0000000010-i0000/rank-00000.safetensors: its bytes" in told
    )
    assert checkpoint("verify", run, "--json") == 1
    assert [one["whole"] for one in json.loads(capsys.readouterr().out)] == [False, True, False]
    assert checkpoint("verify", run, "--step", 11) == 2
    assert "no checkpoint there of step 11" in capsys.readouterr().err


def test_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint("export", run, "--safetensors", tmp_path / "all.safetensors") == 0
    assert "of step 20 (incarnation 1)" in capsys.readouterr().err
    found = load_file(tmp_path / "all.safetensors")
    state = sample_state(20)
    assert found["model.transposed"].equal(state["model"]["transposed"])
    assert found["views.2"].equal(state["views"][2])
    assert checkpoint("export", run, "--dcp", tmp_path / "dcp", "--step", 10) == 0
    assert (tmp_path / "dcp" / ".metadata").exists()
    assert checkpoint("export", run) == 2
    assert checkpoint("export", run, "--step", 30, "--dcp", tmp_path / "other") == 2
    assert "no whole step: step-0000000030-i0001: has no manifest" in capsys.readouterr().err


def test_prune(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint("prune", run, "--keep", 1, "--dry-run") == 0
    assert capsys.readouterr().out == "would remove step 10 (incarnation 0)\n"
    assert checkpoint("prune", run, "--keep", 2) == 0
    assert capsys.readouterr().out == ""
    assert checkpoint("prune", run, "--keep", 1) == 0
    assert sorted(path.name for path in run.iterdir()) == ["step-0000000020-i0001", "step-0000000030-i0001"]
    (run / "step-0000000020-i0001" / "manifest.json").unlink()
    assert checkpoint("prune", run, "--keep", 1) == 2
    assert "no whole step there; nothing is removed" in capsys.readouterr().err
    assert checkpoint("prune", run, "--keep", 0) == 2
