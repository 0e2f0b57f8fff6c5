"""Quorums that can act at the same time share a seat: over all small councils, against counting by hand."""

from __future__ import annotations

from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.quorum import is_majority, is_quorum

SEATS = st.lists(st.integers(1, 8), min_size=1, max_size=5, unique=True)


def subsets(seats: list[int]) -> list[set[int]]:
    return [set(one) for one in chain.from_iterable(combinations(seats, n) for n in range(len(seats) + 1))]


@given(SEATS)
def test_two_majorities_share_a_seat_and_all_but_a_few_are_one(seats: list[int]) -> None:
    majorities = [one for one in subsets(seats) if is_majority(seats, one)]
    assert all(one & other for one in majorities for other in majorities)
    assert is_majority(seats, seats)
    for one in subsets(seats):
        votes = len(one) + (len(seats) % 2 == 0 and seats[0] in one)
        assert is_majority(seats, one) == (votes > (len(seats) | 1) / 2)


@given(SEATS, SEATS)
def test_a_change_of_seats_has_no_moment_in_which_two_can_act(former: list[int], seats: list[int]) -> None:
    """Before: the former alone; in between: both; afterwards: the new ones alone."""
    everybody = sorted({*former, *seats})
    before = [one for one in subsets(everybody) if is_quorum(former, (), one)]
    between = [one for one in subsets(everybody) if is_quorum(seats, former, one)]
    after = [one for one in subsets(everybody) if is_quorum(seats, (), one)]
    assert between
    assert all(one & other for one in before for other in between)
    assert all(one & other for one in between for other in after)
