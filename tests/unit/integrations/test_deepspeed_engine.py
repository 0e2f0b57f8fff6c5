"""The checkpoint engine between DeepSpeed and the one it had."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.errors import CheckpointError
from keepstep.integrations.deepspeed import MemoryEngine


class Inner:
    """An engine with a pending commit, that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.pending = "step 1"

    def create(self, info: object) -> None:
        self.told.append(("create", info))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)
        self.told.append(("makedirs", path))

    def save(self, state_dict: object, path: str) -> None:
        self.told.append(("save", state_dict, path))

    def load(self, path: str, map_location: object = None) -> str:
        return f"from {path}"

    def commit(self, info: object) -> bool:
        self.told.append(("commit", info))
        return True

    def is_decoupled(self) -> bool:
        return True

    def get_commit_info(self) -> str:
        return self.pending


@pytest.fixture
def engine() -> MemoryEngine:
    return MemoryEngine(Inner())


def test_what_is_taken_into_memory_never_reaches_the_engine_beneath(engine: Any, tmp_path: Path) -> None:
    folder = str(tmp_path)
    with engine.taking(folder) as states:
        engine.create("info")
        engine.makedirs(f"{folder}/tag", exist_ok=True)
        engine.save(state_dict={"a": 1}, path=f"{folder}/tag/one.pt")
        assert not engine.is_decoupled()
        assert engine.commit("info")
    assert states == {"tag/one.pt": {"a": 1}}
    assert engine._inner.told == []
    assert engine.get_commit_info() == "step 1"
    assert engine.is_decoupled()


def test_everything_else_is_the_engine_beneath(engine: Any, tmp_path: Path) -> None:
    engine.create("info")
    engine.makedirs(str(tmp_path / "tag"))
    engine.save({"a": 1}, "there")
    engine.commit("info")
    assert [told[0] for told in engine._inner.told] == ["create", "makedirs", "save", "commit"]
    assert engine.load("there") == "from there"


def test_memory_gives_what_it_has_and_refuses_the_rest(engine: Any) -> None:
    with engine.giving("/folder", {"tag/one.pt": {"a": [1]}}):
        assert engine.load("/folder/tag/one.pt", map_location="cpu") == {"a": [1]}
        with pytest.raises(CheckpointError, match=r"has no tag/two\.pt"):
            engine.load("/folder/tag/two.pt")
    assert engine.load("/folder/tag/two.pt") == "from /folder/tag/two.pt"


def test_a_save_that_fails_leaves_the_engine_beneath_in_its_place(engine: Any) -> None:
    with pytest.raises(OSError, match="full"), engine.taking("/folder"):
        raise OSError("full")
    engine.save({"a": 1}, "there")
    assert engine._inner.told == [("save", {"a": 1}, "there")]
