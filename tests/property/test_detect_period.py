from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.detect.period import find_period

patterns = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def smallest_period(symbols: list[int]) -> int:
    return next(
        length
        for length in range(1, len(symbols) + 1)
        if all(symbols[place] == symbols[place - length] for place in range(length, len(symbols)))
    )


@given(patterns, st.integers(4, 12), st.integers(0, 11))
def test_clean_sequences_have_the_period_that_brute_force_finds(
    pattern: list[int], times: int, cut: int
) -> None:
    symbols = (pattern * times)[min(cut, len(pattern) - 1) :]
    true = smallest_period(symbols)
    period = find_period(symbols)
    if len(symbols) < max(12, 3 * true):
        return
    assert period == true


@given(patterns, st.integers(6, 12), st.lists(st.integers(10, 13), max_size=12))
def test_a_foreign_prefix_changes_nothing(pattern: list[int], times: int, prefix: list[int]) -> None:
    symbols = pattern * times
    if len(symbols) < 24:
        return
    assert find_period(prefix + symbols) == smallest_period(symbols)


@given(st.lists(st.one_of(st.integers(0, 2), st.tuples(st.text(max_size=1), st.integers(0, 1))), max_size=80))
def test_any_symbols_are_taken(symbols: list[object]) -> None:
    period = find_period(symbols)  # type: ignore[arg-type]
    if period is not None:
        assert 1 <= period <= len(symbols) // 3
