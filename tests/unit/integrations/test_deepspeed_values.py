"""Objects of DeepSpeed and its users as plain values and back; nothing else comes to life."""

from __future__ import annotations

import argparse
import sys
import types
from collections import OrderedDict
from enum import Enum
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.errors import CheckpointError
from keepstep.integrations.deepspeed_values import MARK, from_plain, pack, to_plain, unpack


@pytest.fixture
def scaler(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class where DeepSpeed has one of that name."""
    name = "deepspeed.runtime.fp16.loss_scaler"
    made = type("LossScaler", (), {"__module__": name})
    module = types.ModuleType(name)
    module.LossScaler = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return made


def test_objects_come_back_wherever_they_stand(scaler: type) -> None:
    one = scaler()
    one.cur_scale, one.dtype = 2.0, torch.float16
    weight = torch.arange(6.0)
    state = {
        "loss_scaler": one,
        "args": argparse.Namespace(folder=Path("/data"), nested=argparse.Namespace(lr=0.1), shapes=[(1, 2)]),
        "row": (types.SimpleNamespace(a=weight), {1: "one"}),
    }
    back = unpack(pack(state))
    assert type(back["loss_scaler"]) is scaler
    assert vars(back["loss_scaler"]) == {"cur_scale": 2.0, "dtype": torch.float16}
    assert back["args"] == state["args"]
    assert torch.equal(back["row"][0].a, weight)
    assert back["row"][1] == {1: "one"}
    assert one.cur_scale == 2.0


def test_an_enum_comes_back_as_the_same_member(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "deepspeed.runtime.zero.config"
    module = types.ModuleType(name)
    stage = Enum("ZeroStageEnum", {"weights": 3}, type=int, module=name)
    module.ZeroStageEnum = stage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    assert from_plain(to_plain([stage(3)]))[0] is stage(3)


def test_a_state_dict_keeps_order_and_metadata() -> None:
    state = torch.nn.Linear(2, 1).state_dict()
    back = unpack(pack(state))
    assert type(back) is OrderedDict
    assert list(back) == ["weight", "bias"]
    assert back._metadata == state._metadata  # type: ignore[attr-defined]


def test_shared_tensors_share_again() -> None:
    weight = torch.zeros(4)
    back = unpack(pack({"whole": weight, "part": weight[1:3]}))
    back["whole"][1] = 5
    assert back["part"][0] == 5


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"args": argparse.Namespace(func=print)}, "func.*builtin_function_or_method cannot be saved"),
        ({"a": {(MARK, "LossScaler"): {}}}, "a: a key that begins with 'keepstep.object'"),
        ({"a": [object()]}, "object cannot be saved"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_path(state: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        pack(state)


def test_a_state_in_itself_is_refused() -> None:
    state: dict[str, object] = {}
    state["again"] = state
    with pytest.raises(CheckpointError, match="in itself"):
        pack(state)


@pytest.mark.parametrize(
    "plain",
    [
        {(MARK, "Popen"): {"args": "true"}},
        {(MARK, "Namespace"): 5},
        {(MARK, "Path"): 5},
        {(MARK, "ZeroStageEnum"): "no such stage"},
    ],
)
def test_nothing_but_what_is_known_is_made(plain: object) -> None:
    with pytest.raises(CheckpointError, match="cannot be made here"):
        from_plain(plain)


@given(st.binary(max_size=80), st.integers(0, 200))
def test_hostile_bytes_are_refused_in_one_line(noise: bytes, cut: int) -> None:
    sound = pack({"a": torch.arange(3.0), "b": [1, "two"]})
    for row in (torch.tensor(list(noise), dtype=torch.uint8), sound[: min(cut, len(sound) - 1)]):
        with pytest.raises(CheckpointError):
            unpack(row)
    with pytest.raises(CheckpointError):
        unpack({"a": 1})
