"""Any state comes back; any bytes are a header that holds, or are refused."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.checkpoint.header import decode_header, encode_header, references, tensor_paths
from keepstep.checkpoint.state import flatten, unflatten
from keepstep.core.errors import CheckpointError

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float8_e4m3fn, torch.Size([3]), torch.device("cpu")])
)
KEYS = st.none() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    base = torch.arange(
        draw(st.integers(0, 200)), dtype=draw(st.sampled_from([torch.int8, torch.bfloat16, torch.int64]))
    )
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    stride = draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    offset = draw(st.integers(0, 50))
    reach = 0 if 0 in shape else offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    return base.as_strided(shape, stride, offset) if 0 < reach <= base.numel() else base


STATES = st.recursive(
    PLAIN | tensors(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and not isinstance(left, torch.Size):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and repr(left) == repr(right)


@given(STATES)
@settings(max_examples=many(300), deadline=None)
def test_any_state_comes_back(state: Any) -> None:
    header, spans = flatten(state, step=1)
    read = decode_header(encode_header(header))
    assert read == header
    assert len(set(tensor_paths(read))) == len(read.tensors)
    assert same(unflatten(read, [span.view().clone() for span in spans]), state)


def use(data: bytes) -> None:
    """Read a header and put the state together on as many bytes as it asks for, up to a page."""
    with contextlib.suppress(CheckpointError):
        header = decode_header(data)
        tensor_paths(header)
        if header.data_bytes <= 4096:
            unflatten(header, [torch.zeros(entry.nbytes, dtype=torch.uint8) for entry in header.storages])


SAMPLE = encode_header(
    flatten({"w": torch.ones(4, 4).t(), 5: [1.5, b"x", 10**30], "t": (torch.float16, None)}, step=9)[0]
)


@given(st.lists(st.tuples(st.integers(0, len(SAMPLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=many(200), deadline=None)
def test_flipped_bytes_are_refused_or_hold(changes: list[tuple[int, int]]) -> None:
    data = bytearray(SAMPLE)
    for place, value in changes:
        data[place] = value
    use(bytes(data))


@given(st.integers(0, len(SAMPLE)), st.binary(max_size=40))
@settings(max_examples=many(300), deadline=None)
def test_cut_and_foreign_bytes_are_refused(length: int, more: bytes) -> None:
    use(SAMPLE[:length] + more)
    use(more)


TAGS = "list tuple set dict ordered tensor array scalar int float complex bytes dtype size device nan float16"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(TAGS.split()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@given(JSON)
@settings(max_examples=many(200), deadline=None)
def test_any_tree_is_refused_or_can_be_put_together(tree: Any) -> None:
    header, _ = flatten([torch.ones(2)], step=0)
    use(msgspec.json.encode(msgspec.structs.replace(header, tree=tree)))


@example([243728, 75_685_781_172_905, 0], [0, 0, 0], 0)
@given(
    st.lists(st.integers(0, 2**60), max_size=3),
    st.lists(st.integers(0, 2**60), max_size=3),
    st.integers(0, 2**60),
)
@settings(max_examples=many(100), deadline=None)
def test_no_tensor_reaches_behind_its_storage(shape: list[int], stride: list[int], offset: int) -> None:
    header, _ = flatten([torch.ones(8)], step=0)
    tensor = msgspec.structs.replace(
        header.tensors[0], shape=tuple(shape), stride=tuple(stride), offset=offset
    )
    use(msgspec.json.encode(msgspec.structs.replace(header, tensors=(tensor,))))


def test_a_deep_tree_is_refused() -> None:
    header, _ = flatten(None, step=0)
    for opening in (b"[", b'{"a":', b'["list",'):
        data = msgspec.json.encode(header).replace(b'"tree":null', b'"tree":' + opening * 200_000)
        use(data)
    tree: Any = None
    for _ in range(500):
        tree = ["list", tree]
    use(msgspec.json.encode(msgspec.structs.replace(header, tree=tree)))
    assert list(references(header)) == []


@pytest.mark.parametrize(
    "tree",
    [
        ["device", ""],
        ["device", "x:y"],
        ["set", ["list"]],
        ["frozenset", {}],
        ["array", 1],
        ["dict", [["list"], 1]],
    ],
)
def test_values_that_cannot_be_made_are_refused(tree: Any) -> None:
    header, spans = flatten([torch.ones(2), torch.ones(2, dtype=torch.bfloat16)], step=0)
    data = msgspec.json.encode(msgspec.structs.replace(header, tree=tree))
    with pytest.raises(CheckpointError):
        unflatten(decode_header(data), [span.view() for span in spans])
