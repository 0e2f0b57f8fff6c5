"""The best allocation of micro-batches, against all allocations there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.mitigate import allocate_microbatches

seconds = st.one_of(st.floats(1e-4, 1e4), st.sampled_from([0.1, 0.2, 0.3, 1.0, 3.0]))


def slowest(counts: list[int], times: list[float], fixed: list[float] | None = None) -> float:
    begun = fixed or [0.0] * len(times)
    return max(own + count * time for count, time, own in zip(counts, times, begun, strict=True))


def every_allocation(total: int, multiple_of: int, most: list[int]) -> list[list[int]]:
    ranges = [range(multiple_of, min(bound, total) + 1, multiple_of) for bound in most]
    return [list(one) for one in itertools.product(*ranges) if sum(one) == total]


@given(st.data())
def test_no_allocation_is_better(data: st.DataObject) -> None:
    times = data.draw(st.lists(seconds, min_size=1, max_size=4), label="seconds")
    multiple_of = data.draw(st.integers(1, 3), label="multiple_of")
    total = multiple_of * data.draw(st.integers(0, 12), label="units")
    at_most = data.draw(st.none() | st.integers(1, 20), label="at_most")
    fixed = data.draw(
        st.none() | st.lists(st.floats(0, 100), min_size=len(times), max_size=len(times)), label="fixed"
    )
    most = total if at_most is None else at_most
    possible = every_allocation(total, multiple_of, [most] * len(times))
    if not possible:
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            allocate_microbatches(times, total, multiple_of, at_most, fixed)
        return
    found = allocate_microbatches(times, total, multiple_of, at_most, fixed)
    assert found in possible
    best = min(slowest(one, times, fixed) for one in possible)
    assert slowest(found, times, fixed) == pytest.approx(best, rel=1e-12)


@given(
    st.lists(st.floats(0.5, 2), min_size=1, max_size=300),
    st.integers(1, 50),
)
def test_in_many_groups_no_micro_batch_is_better_moved(times: list[float], each: int) -> None:
    total = each * len(times)
    found = np.array(allocate_microbatches(times, total))
    costs = np.array(times)
    assert found.sum() == total
    assert found.min() >= 1
    slow = int((found * costs).argmax())
    taker = np.delete((found + 1) * costs, slow)
    assert found[slow] == 1 or (taker >= found[slow] * costs[slow]).all()


def test_groups_of_one_speed_take_the_same() -> None:
    assert allocate_microbatches([0.7] * 512, 512 * 8) == [8] * 512


def test_a_slow_group_takes_less() -> None:
    assert allocate_microbatches([1, 1, 1, 2], 31) == [9, 9, 9, 4]
    assert allocate_microbatches([1, 1, 1, 2], 32, multiple_of=4) == [12, 8, 8, 4]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([], 4), "one number for each group"),
        (([[1.0]], 4), "one number for each group"),
        (([1.0, 0.0], 4), "0.0 of group 1 is not a time"),
        (([float("nan"), 1.0], 4), "nan of group 0 is not a time"),
        (([1.0, 1.0], 3, 2), "3 micro-batches are not a multiple of 2"),
        (([1.0, 1.0], 2, 2), "too few for 2 groups"),
        (([1.0, 1.0], 9, 1, 4), "the groups take 8 at most"),
        (([1.0, 1.0], 8, 2, 1), "at_most: 1 is less than 2"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(arguments: tuple[object, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        allocate_microbatches(*arguments)  # type: ignore[arg-type]
