"""States taken apart and put together again."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.checkpoint.header import ITEM_BYTES, decode_header, encode_header, tensor_paths
from keepstep.checkpoint.state import DTYPES, flatten, placement_of, unflatten
from keepstep.core.errors import CheckpointError


def there_and_back(state: Any) -> Any:
    header, spans = flatten(state, step=7, incarnation=2, rank=1, world_size=4, layout="dp4")
    read = decode_header(encode_header(header))
    assert read == header
    return unflatten(read, [span.view().clone() for span in spans])


def test_the_sizes_of_elements_are_torchs() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == {n: ITEM_BYTES[n] for n in DTYPES}


def test_a_trained_model_its_optimizer_and_all_random_states_come_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
    }
    back = there_and_back(state)
    assert type(back["model"]) is OrderedDict
    assert back["model"]._metadata == state["model"]._metadata
    assert all(torch.equal(back["model"][name], value) for name, value in state["model"].items())
    torch.optim.AdamW(model.parameters()).load_state_dict(back["optimizer"])
    random.setstate(back["random"][0])
    np.random.set_state(back["random"][1])
    torch.set_rng_state(back["random"][2])


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -1,
        2**64,
        -(10**4000),
        0.1,
        -0.0,
        math.inf,
        -math.inf,
        complex(math.inf, -2.5),
        "",
        "naïve\0",
        b"\0\xff",
        (),
        (1, [2, {3}], frozenset({4})),
        {1: "a", None: "b", (1, "x"): [], b"k": 2.0, "s": {}},
        OrderedDict([("b", 1), ("a", 2)]),
        torch.bfloat16,
        torch.Size([2, 0]),
        torch.device("cuda", 1),
    ],
)
def test_plain_values_come_back_with_their_types(value: Any) -> None:
    back = there_and_back({"value": value})["value"]
    assert back == value
    assert repr(back) == repr(value)


def test_nan_comes_back_where_it_was() -> None:
    back = there_and_back([math.nan, complex(1, math.nan)])
    assert math.isnan(back[0])
    assert math.isnan(back[1].imag)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_keeps_its_bits(name: str) -> None:
    raw = torch.arange(64, dtype=torch.uint8) % (2 if name == "bool" else 251)
    back = there_and_back([raw.view(DTYPES[name])])[0]
    assert back.dtype == DTYPES[name]
    assert torch.equal(back.view(torch.uint8), raw)


def test_shared_storage_is_kept_once_and_shared_again() -> None:
    base = torch.arange(10_000.0)
    state = {
        "rows": base[100:200].view(10, 10),
        "columns": base[100:200].view(10, 10).t(),
        "some": base[150:300:7],
    }
    header, _ = flatten(state, step=0)
    assert len(header.storages) == 1
    assert header.data_bytes < 1000  # what no tensor reaches stays behind
    back = there_and_back(state)
    assert all(torch.equal(back[name], state[name]) for name in state)
    back["rows"][5, 0] = -1.0
    assert back["columns"][0, 5] == -1.0
    assert back["some"][0] == -1.0


def test_expanded_empty_and_single_tensors_keep_shape_and_size() -> None:
    state = [torch.ones(1).expand(1000, 1000), torch.empty(0, 3, dtype=torch.int8), torch.tensor(5)]
    header, _ = flatten(state, step=0)
    assert header.data_bytes < 200
    back = there_and_back(state)
    assert [tensor.shape for tensor in back] == [tensor.shape for tensor in state]
    assert back[0].stride() == (0, 0)
    assert back[2] == 5


def test_an_empty_view_of_a_storage_of_which_only_the_end_is_kept() -> None:
    whole = torch.arange(1000.0)
    back = there_and_back([whole[:0].view(0, 3), whole[900:], whole[950:950]])
    assert [tuple(tensor.shape) for tensor in back] == [(0, 3), (100,), (0,)]
    assert torch.equal(back[1], whole[900:])


def test_lazily_conjugated_tensors_are_kept_as_they_read() -> None:
    tensor = torch.randn(5, dtype=torch.complex64)
    back = there_and_back([tensor.conj(), tensor.conj().imag])
    assert torch.equal(back[0], tensor.conj())
    assert torch.equal(back[1], tensor.conj().imag)


def test_numpy_values_come_back_as_numpys() -> None:
    array = np.arange(12, dtype=np.uint32).reshape(3, 4)[::-1, ::2]
    back = there_and_back([array, np.float32(2.5), np.int64(3)])
    assert back[0].dtype == np.uint32
    assert np.array_equal(back[0], array)
    assert type(back[1]) is np.float32
    assert type(back[2]) is np.int64


def test_paths_name_each_tensor_once() -> None:
    weight = torch.ones(2)
    state = {
        "model": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}, "tied": weight},
        "again": [weight],
        3: weight,
    }
    header, _ = flatten(state, step=0)
    assert tensor_paths(header) == ("model.a.b", "model.a.b#2", "model.tied")


class _Named(tuple[int, ...]):
    __slots__ = ()


class _Proxy:
    __class__ = property(lambda _: bytes)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            object(),
            "x.1: a builtins.object cannot be saved without running code: give plain values or tensors",
        ),
        (_Named((1,)), "x.1: a .*_Named cannot be saved"),
        pytest.param(_Proxy(), "x.1: a .*_Proxy cannot be saved", id="proxy"),
        (torch.nn.Linear(1, 1), "Linear cannot be saved without running code: give its state_dict()"),
        (torch.Generator(), "a torch.Generator; give its get_state()"),
        (torch.eye(2).to_sparse(), "x.1: a Tensor .*sparse_coo.* has no plain bytes"),
        (torch.empty(1, device="meta"), "x.1: a Tensor .*meta.* has no plain bytes"),
        (np.array([object()]), "a numpy array of dtype object"),
        ({torch.ones(1): 1}, "x.1: a tensor as a key of a dict"),
        ("\ud800", "text with half a character"),
    ],
)
def test_what_cannot_be_said_safely_is_refused_with_its_path(value: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said.replace("()", r"\(\)")):
        flatten({"x": [1, value]}, step=0)


def test_a_state_in_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(CheckpointError, match="in itself"):
        flatten(state, step=0)


def test_the_local_part_of_a_dtensor_says_where_it_belongs() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        part = DTensor.from_local(
            torch.ones(1, 6), mesh, [Replicate(), Shard(0)], shape=torch.Size((3, 6)), stride=(6, 1)
        )
        header, _ = flatten({"w": part}, step=0)
        shard = header.tensors[0].shard
        assert shard is not None
        assert (shard.global_shape, shard.offset) == ((3, 6), (2, 0))
        assert (shard.mesh_shape, shard.mesh_names, shard.coordinate) == ((2, 2), ("dp", "tp"), (1, 1))
        assert shard.placements == ("R", "S(0)")
        assert torch.equal(there_and_back([part])[0], torch.ones(1, 6))
        with pytest.raises(CheckpointError, match="reduce it first"):
            flatten([DTensor.from_local(torch.ones(2), mesh, [Partial(), Replicate()])], step=0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("word", ["R", "S(0)", "S(11)", "_S(1, 4)"])
def test_placements_are_read_as_they_are_written(word: str) -> None:
    placement = placement_of(word)
    written = {"Replicate": "R", "Shard": f"S({getattr(placement, 'dim', '')})"}.get(
        type(placement).__name__,
        f"_S({getattr(placement, 'dim', '')}, {getattr(placement, 'split_factor', '')})",
    )
    assert written == word


@pytest.mark.parametrize("word", ["", "P", "S(1, 2)", "_S(1)", "S(-1)", "S(1) ", "R(0)"])
def test_other_placements_are_refused(word: str) -> None:
    with pytest.raises(CheckpointError, match="a placement"):
        placement_of(word)
