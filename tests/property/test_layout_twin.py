"""ParallelLayout against a twin that walks all ranks with a counter."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.layout import DIMENSIONS, ParallelLayout

layouts = st.builds(
    lambda sizes, order: ParallelLayout(**dict(zip(DIMENSIONS, sizes, strict=True)), order="-".join(order)),
    st.tuples(*[st.integers(1, 4)] * 5),
    st.permutations(DIMENSIONS),
)


def dealt_out(layout):
    """Coordinates of every rank, by counting."""
    order = layout.order.split("-")
    odometer = itertools.product(*(range(layout.size(name)) for name in reversed(order)))
    return [dict(zip(reversed(order), digits, strict=True)) for digits in odometer]


@given(layouts)
def test_coordinates(layout):
    expected = dealt_out(layout)
    arrays = layout.all_coordinates()
    for rank, coordinates in enumerate(expected):
        assert layout.coordinates(rank) == coordinates
        assert {name: int(array[rank]) for name, array in arrays.items()} == coordinates


@given(layouts, st.sampled_from(DIMENSIONS))
def test_groups(layout, inside):
    groups: dict[tuple[int, ...], list[int]] = {}
    outer = [name for name in reversed(layout.order.split("-")) if name != inside]
    for rank, coordinates in enumerate(dealt_out(layout)):
        groups.setdefault(tuple(coordinates[name] for name in outer), []).append(rank)
    expected = [members for _, members in sorted(groups.items())]
    assert layout.groups(inside).tolist() == expected
    for members in expected:
        assert list(layout.group_of(members[-1], inside)) == members
