"""What becomes of a live state when a snapshot is brought back into it."""

from __future__ import annotations

import mmap
from array import array
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.checkpoint import native
from keepstep.checkpoint.header import StateHeader, encode_header
from keepstep.checkpoint.memory.slots import read_header, read_record
from keepstep.checkpoint.restore.filling import Filling
from keepstep.checkpoint.state import flatten, with_state_dicts
from keepstep.core.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("copy_engine")


def sealed(state: Any) -> tuple[StateHeader, mmap.mmap]:
    header, spans = flatten(with_state_dicts(state), step=1)
    text = encode_header(header)
    slot = mmap.mmap(-1, native.slot_bytes(header.data_bytes, len(text), len(spans)))
    plan = array("Q")
    for entry, span in zip(header.storages, spans, strict=True):
        plan.extend((span.pointer, entry.offset, entry.nbytes, 0))
    native.Snapshot(
        slot, plan, header=text, data_bytes=header.data_bytes, step=1, incarnation=0, board=None
    ).wait()
    with memoryview(slot) as view:
        record = read_record(view)
        assert record is not None
        return read_header(view, record), slot


def restore(saved: Any, state: Any) -> None:
    filling = Filling(state, *sealed(saved), threads=2, left=[])
    filling.copy()
    assert filling.damaged == []
    filling.finish()


def test_tensors_are_filled_where_they_are_whatever_their_strides() -> None:
    base = torch.arange(24.0)
    saved = {
        "a": base.view(4, 6),
        "b": base.view(4, 6).t(),
        "c": base[3:9],
        "d": torch.arange(6.0).view(2, 3).t(),
        "e": torch.empty(0),
    }
    targets = {name: torch.zeros(tensor.shape) for name, tensor in saved.items()}
    state = dict(targets)
    restore(saved, state)
    for name, tensor in saved.items():
        assert state[name] is targets[name]
        assert torch.equal(state[name], tensor)


def test_expanded_tensors_are_filled_once_and_never_with_what_they_cannot_hold() -> None:
    saved = {"a": torch.tensor([3.0]).expand(4), "b": torch.arange(3.0).view(3, 1).expand(3, 5)}
    state = {"a": torch.zeros(1).expand(4), "b": torch.zeros(3, 1).expand(3, 5)}
    restore(saved, state)
    assert state["a"].tolist() == [3.0] * 4
    assert state["b"].tolist() == [[0.0] * 5, [1.0] * 5, [2.0] * 5]
    with pytest.raises(
        CheckpointError, match="a: the state's elements share memory, those of the snapshot do not"
    ):
        restore({"a": torch.arange(4.0)}, {"a": torch.zeros(1).expand(4)})


def test_what_the_state_has_no_tensor_for_comes_in_memory_of_its_own_and_shares_it() -> None:
    base = torch.arange(10.0)
    header, slot = sealed({"a": base[2:], "b": base[:5], "n": np.arange(3), "s": {1, 2}})
    state: dict[str, Any] = {}
    filling = Filling(state, header, slot, 1, [])
    filling.copy()
    assert state == {}
    filling.finish()
    slot[:] = bytes(len(slot))
    assert torch.equal(state["a"], base[2:])
    state["a"][0] = -1
    assert state["b"][2] == -1
    assert state["n"].tolist() == [0, 1, 2]
    assert state["s"] == {1, 2}


def test_containers_and_plain_values_are_replaced_in_place() -> None:
    saved = {
        "l": [1, [2], (3, torch.ones(2))],
        "o": OrderedDict(x=1),
        "d": {5: "five"},
        "none": None,
        "new": 1.5,
    }
    inner: list[Any] = [0, [0], (0, torch.zeros(2))]
    state = {"l": inner, "o": OrderedDict(x=0), "d": {5: ""}, "none": 3}
    restore(saved, state)
    assert state["l"] is inner
    assert inner[:2] == [1, [2]]
    assert torch.equal(inner[2][1], torch.ones(2))
    assert (state["o"], state["d"], state["none"], state["new"]) == (OrderedDict(x=1), {5: "five"}, None, 1.5)


def test_models_are_filled_in_place_and_optimizers_load() -> None:
    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        model[0].weight = torch.nn.Parameter(torch.randn(3, 3).t())
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        return {"model": model, "both": [optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)]}

    saved, state = made(0), made(1)
    weight = state["model"][0].weight
    restore(saved, state)
    assert state["model"][0].weight is weight
    for name, value in saved["model"].state_dict().items():
        assert torch.equal(state["model"].state_dict()[name], value)
    exported = [optimizer.state_dict()["state"] for optimizer in (saved["both"][0], state["both"][0])]
    for index, values in exported[0].items():
        assert all(torch.equal(value, exported[1][index][name]) for name, value in values.items())


class Odd(torch.nn.Linear):
    """Keeps more than its tensors."""

    extra = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"extra": self.extra}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.extra = state["extra"]


def test_modules_with_more_than_tensors_load_it_themselves() -> None:
    saved, state = {"m": Odd(2, 2)}, {"m": Odd(2, 2)}
    saved["m"].extra = 7
    restore(saved, state)
    assert state["m"].extra == 7
    assert torch.equal(state["m"].weight, saved["m"].weight)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"w": torch.zeros(3)}, r"w: the snapshot has float32 of \(2,\), the state torch.float32 of \(3,\)"),
        ({"w": torch.zeros(2).double()}, r"w: the snapshot has float32 .*torch.float64"),
        ({"w": torch.zeros(2), "u": 2}, "u: not in the snapshot$"),
        ({"w": torch.zeros(2), "v": 1, "u": 2}, "u: not in the snapshot, nor are 1 more$"),
        ([torch.zeros(2)], "give load.. a dict"),
    ],
)
def test_a_state_of_another_structure_is_refused_before_anything_changes(state: Any, said: str) -> None:
    header, slot = sealed({"w": torch.ones(2)})
    with pytest.raises(CheckpointError, match=said):
        Filling(state, header, slot, 1, [])


@pytest.mark.parametrize("view", [slice(None), slice(2, 900), slice(0, 900, 3)])
def test_every_byte_is_checked_also_of_parts(view: slice) -> None:
    base = torch.arange(1000.0)
    header, slot = sealed({"all": base, "part": base[view]})
    for place in (native.DATA_OFFSET, native.DATA_OFFSET + 1999, native.DATA_OFFSET + 3999):
        slot[place] ^= 4
        for state in ({}, {"part": torch.zeros(base[view].shape)}, {"all": torch.zeros(1000)}):
            filling = Filling(state, header, slot, 2, [])
            filling.copy()
            assert filling.damaged == [0]
        slot[place] ^= 4


def test_dtensors_are_filled_locally_and_only_when_placed_alike() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        saved = {"w": DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])}
        state = {"w": DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)])}
        restore(saved, state)
        assert torch.equal(state["w"].to_local(), torch.ones(2, 3))
        header, slot = sealed(saved)
        found: dict[str, Any] = {"model": [state["w"]]}
        restore({"model": [saved["w"]], "optimizer": {"average": saved["w"]}}, found)
        average = found["optimizer"]["average"]
        assert (average.device_mesh, average.placements, average.shape) == (mesh, (Shard(0),), (4, 3))
        assert torch.equal(average.to_local(), torch.ones(2, 3))
        with pytest.raises(CheckpointError, match="put the model into the state, too"):
            Filling({}, header, slot, 1, [])
        with pytest.raises(CheckpointError, match="it must be resharded"):
            Filling({"w": DTensor.from_local(torch.zeros(2, 3), mesh, [Replicate()])}, header, slot, 1, [])
        with pytest.raises(CheckpointError, match="is to become a whole tensor"):
            Filling({"w": torch.zeros(2, 3)}, header, slot, 1, [])
    finally:
        dist.destroy_process_group()
