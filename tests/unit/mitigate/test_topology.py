"""Exchanges of nodes, against all sets of disjoint swaps there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.errors import UsageError
from keepstep.mitigate import best_exchange

HEALTHY = 1e-9


def every_exchange(free: list[int]) -> Iterator[list[tuple[int, int]]]:
    if len(free) < 2:
        yield []
        return
    first, rest = free[0], free[1:]
    yield from every_exchange(rest)
    for other in rest:
        for more in every_exchange([one for one in rest if one != other]):
            yield [(first, other), *more]


def cost(
    nodes: int,
    traffic: dict[tuple[int, int], float],
    links: dict[tuple[int, int], float],
    swaps: list[tuple[int, int]],
) -> float:
    """What the slowest link takes, all links looked at."""
    place = list(range(nodes))
    for one, other in swaps:
        place[one], place[other] = other, one
    worst = 0.0
    for one in range(nodes):
        for other in range(one):
            carried = sum(
                traffic.get(pair, 0.0) for pair in ((place[one], place[other]), (place[other], place[one]))
            )
            seconds = max(links.get((one, other), 0.0), links.get((other, one), 0.0), HEALTHY)
            worst = max(worst, carried * seconds)
    return max(worst, max((traffic.get((a, b), 0.0) + traffic.get((b, a), 0.0)
                           for a in range(nodes) for b in range(a)), default=0.0) * HEALTHY)  # fmt: skip


@st.composite
def jobs(
    draw: st.DrawFn,
) -> tuple[int, dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    nodes = draw(st.integers(2, 6))
    pairs = [(a, b) for a in range(nodes) for b in range(nodes) if a < b]
    sizes = st.sampled_from([0.0, 1e6, 2e6, 1e7, 1e8])
    traffic = {pair: draw(sizes) for pair in pairs}
    links = draw(st.dictionaries(st.sampled_from(pairs), st.sampled_from([2e-9, 1e-8, 1e-7]), max_size=3))
    return nodes, traffic, links


@given(jobs())
def test_no_exchange_is_better_by_more_than_2_percent(
    job: tuple[int, dict[tuple[int, int], float], dict[tuple[int, int], float]],
) -> None:
    nodes, traffic, links = job
    found = best_exchange(nodes, traffic, HEALTHY, links)
    before_s = cost(nodes, traffic, links, [])
    costs = {tuple(one): cost(nodes, traffic, links, one) for one in every_exchange(list(range(nodes)))}
    least_s = min(costs.values())
    if found is None:
        assert least_s * 1.02 >= before_s
        return
    assert found.before_s == pytest.approx(before_s)
    assert found.after_s == pytest.approx(cost(nodes, traffic, links, list(found.swaps)))
    assert least_s <= found.after_s * 1.000001 <= least_s * 1.021
    assert found.after_s * 1.01 < before_s
    assert len({node for pair in found.swaps for node in pair}) == 2 * len(found.swaps)


def test_heavy_traffic_moves_off_the_one_slow_link() -> None:
    # DP2 × PP2 on four nodes: the data-parallel pairs (0, 2) and (1, 3) carry much, pipelines little.
    traffic = {(0, 2): 1e8, (1, 3): 1e8, (0, 1): 1e6, (2, 3): 1e6}
    found = best_exchange(4, traffic, 1e-9, {(0, 2): 2e-8})
    assert found is not None
    assert len(found.swaps) == 1
    assert (found.before_s, found.after_s) == (pytest.approx(2.0), pytest.approx(0.1))
    assert found.bound_s == found.after_s


def test_where_all_links_carry_as_much_nothing_is_exchanged() -> None:
    ring = {(0, 1): 1e8, (1, 2): 1e8, (0, 2): 1e8}
    assert best_exchange(3, ring, 1e-9, {(0, 1): 1e-8}) is None
    assert best_exchange(3, ring, 1e-9, {}) is None


def test_ten_thousand_nodes_are_searched_at_once() -> None:
    nodes = 10_000
    ring = {(place, (place + 16) % nodes): 1e8 for place in range(nodes)}
    found = best_exchange(nodes, ring, 1e-9, {(5, 21): 5e-8, (100, 116): 2e-8})
    assert found is not None
    assert found.after_s == pytest.approx(0.1)
    assert found.bound_s == found.after_s
    assert len(found.swaps) == 2


@pytest.mark.parametrize(
    ("nodes", "traffic", "links"),
    [
        (2, {(0, 2): 1.0}, {}),
        (2, {(0, 1): -1.0}, {}),
        (2, {(0, 1): float("nan")}, {}),
        (2, {}, {(1, 1): 1.0}),
        (2, {}, {(0, 5): 1.0}),
    ],
)
def test_what_is_no_job_is_refused(
    nodes: int, traffic: dict[tuple[int, int], float], links: dict[tuple[int, int], float]
) -> None:
    with pytest.raises(UsageError, match="node ranks 0 to 1"):
        best_exchange(nodes, traffic, 1e-9, links)
