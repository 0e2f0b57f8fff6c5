from __future__ import annotations

import contextlib
import math
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.errors import TraceError
from keepstep.traces import plain_data
from keepstep.traces.plain_data import read_json, read_pickle

START = b"\x80\x02"
KEYS = st.one_of(st.text(max_size=5), st.integers(-(1 << 63) + 1, (1 << 63) - 1))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 200), 1 << 200), st.floats(allow_nan=False), st.text()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(KEYS, inner), st.tuples(inner, inner)),
    max_leaves=40,
)


@given(VALUES, st.integers(2, 5))
def test_plain_data_is_read_as_pickle_reads_it(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol)) == value


@given(VALUES, st.integers(2, 5), st.binary(max_size=8), st.integers(0, 200))
def test_damage_raises_nothing_but_a_trace_error(value: Any, protocol: int, data: bytes, at: int) -> None:
    whole = pickle.dumps(value, protocol)
    with contextlib.suppress(TraceError):
        read_pickle(whole[:at] + data + whole[at + len(data) :])


@given(st.binary(max_size=60))
def test_noise_raises_nothing_but_a_trace_error(data: bytes) -> None:
    with contextlib.suppress(TraceError):
        read_pickle(START + data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cut short"),
        (START + b"X\xff\xff\xff\x7fab.", "cut short"),
        (START + b"]q\0h\0a.", "lists within lists"),
        (START + b"]" * 100 + b"a" * 99 + b".", "lists within lists"),
        (START + b"h\7.", "refers to its part 7"),
        (START + b"\x8b\0\0\0\1.", "a number of 16777216 bytes"),
        (START + b"})Ns.", "a key of type tuple"),
        (START + b"}G\0\0\0\0\0\0\0\0Ns.", "a key of type float"),
        (START + b"cos\nsystem\n.", "an object of os.system"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "an object of os.system"),
        (START + b"NQ.", "data outside of it"),
        (START + b"\x8f.", "sets, objects or buffers"),
        (START + b"\xff", "neither a pickle nor JSON"),
        (START + b"NNa.", "a list that is none"),
        (START + b"](Nu.", "a dict that is none"),
    ],
)
def test_what_a_pickle_may_not_hold(data: bytes, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_pickle(data)


def test_lists_that_hold_each_other_are_measured_before_anybody_walks_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value: Any = ["x"]
    for _ in range(20):
        value = [value, value]
    data = pickle.dumps(value)
    assert read_pickle(data) == value
    monkeypatch.setattr(plain_data, "MOST_VALUES", 1 << 20)
    with pytest.raises(TraceError, match="more than 1,048,576 values"):
        read_pickle(data)


def test_the_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_data, "MOST_VALUES", 100)
    for content in (
        START + b"]" * 200 + b".",
        START + b"(" * 200,
        START + b"X\x10\x27\0\0" + b"a" * 10_000 + b".",
    ):
        with pytest.raises(TraceError, match="more than 100 values"):
            read_pickle(content)
    with pytest.raises(TraceError, match="more than 100 values"):
        read_json(b"[" + b"[]," * 200 + b"[]]")


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.text(), st.integers(-(1 << 63), (1 << 63) - 1)), st.lists
    )
)
def test_json_is_read(value: Any) -> None:
    assert read_json(msgspec.json.encode(value)) == value


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"[1, ", "cut short"),
        (b"[" * 100_000, "lists within lists"),
        (b'"\xff"', "neither"),
        (b"{1}", "neither"),
    ],
)
def test_what_json_may_not_hold(data: bytes, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_json(data)


def test_odd_numbers_are_read() -> None:
    assert read_pickle(pickle.dumps([math.inf, -1, 1 << 100])) == [math.inf, -1, 1 << 100]
