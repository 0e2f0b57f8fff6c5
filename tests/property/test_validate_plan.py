"""The pass plan: every link of a topology once, no rank in two pairs of a pass, as many passes whatever the size."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from keepstep.validate.plan import ring_passes, transfers, tree_passes

sizes = st.integers(min_value=2, max_value=300)


@given(sizes)
def test_a_ring_is_tested_in_two_passes_or_three(size: int) -> None:
    passes = ring_passes(size)
    assert len(passes) == (2 if size % 2 == 0 else 3)
    assert sorted(chain(*passes)) == [(place, (place + 1) % size) for place in range(size)]
    nobody_twice(passes)


@given(sizes)
def test_a_tree_is_tested_in_at_most_four_passes(size: int) -> None:
    passes = tree_passes(size)
    assert len(passes) == min(size - 1, 4) if size != 4 else len(passes) == 3
    assert sorted(chain(*passes)) == [(place, (place - 1) // 2) for place in range(1, size)]
    nobody_twice(passes)


@given(st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True), max_size=5))
def test_groups_that_share_ranks_come_one_after_another(groups: list[list[int]]) -> None:
    found = transfers(groups)
    assert max(Counter((one.source, one.target) for one in found).values(), default=1) == 1
    busy = Counter((one.number, rank) for one in found for rank in (one.source, one.target))
    assert max(busy.values(), default=1) == 1
    linked = {frozenset((one.source, one.target)) for one in found}
    for members in groups:
        for place, rank in enumerate(members[1:], 1):
            assert frozenset((members[place - 1], rank)) in linked
            assert frozenset((members[(place - 1) // 2], rank)) in linked
    assert [one.number for one in found] == sorted(one.number for one in found)


def nobody_twice(passes: tuple[tuple[tuple[int, int], ...], ...]) -> None:
    for pairs in passes:
        ranks = list(chain(*pairs))
        assert len(ranks) == len(set(ranks))
