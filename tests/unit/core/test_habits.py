"""How usual a call is, against a dumb count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.habits import usual


def dumb(calls: Sequence[int], at: int) -> int:
    if at < 8:
        return -1
    for back in range(8, 0, -1):
        run = list(calls[at - back : at])
        after = [calls[i] for i in range(back, at) if list(calls[i - back : i]) == run]
        if after:
            return after.count(calls[at])
    return -1


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.data())
def test_as_a_dumb_count(calls: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(calls) - 1))
    assert usual(np.array(calls, np.uint64), at) == dumb(calls, at)


@pytest.mark.parametrize(
    ("past", "call", "expected"),
    [
        ("ababababab", "a", 1),  # the whole run of 8 was there once before
        ("ababababab", "b", 0),
        ("aaaaaaaaaaaa", "a", 4),
        ("aaaaaaab" * 4, "b", 0),  # every step of seven ends with one
        ("aaaaaaab" * 4, "a", 3),
        ("abcdefgh", "a", -1),  # it has never been here
        ("abcdefg", "a", -1),  # too short a past
    ],
)
def test_the_longest_known_run_before_a_call_is_its_place(past: str, call: str, expected: int) -> None:
    calls = np.array([ord(one) for one in past + call], np.uint64)
    assert usual(calls, len(past)) == expected
