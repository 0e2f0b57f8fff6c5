"""Pairs of nodes against a dumb twin: clusters with bad nodes and cut links, of which only the bad nodes are named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.validation import LinkFigure
from keepstep.validate import node_pairs
from keepstep.validate.node_pairs import Pair, PairsJudged
from keepstep.validate.plan import Pairs

FAST = 1e9


@st.composite
def clusters(draw: st.DrawFn) -> tuple[int, frozenset[int], frozenset[frozenset[int]], dict[int, float]]:
    """Number of nodes, those that reach nobody, links that are cut, and the speed of slow nodes."""
    count = draw(st.integers(2, 24))
    nodes = st.integers(0, count - 1)
    bad = draw(st.frozensets(nodes, max_size=count // 2))
    cut = draw(st.frozensets(st.frozensets(nodes, min_size=2, max_size=2), max_size=4))
    slow = draw(st.dictionaries(nodes, st.floats(0.01, 0.19), max_size=count // 4))
    return count, bad, cut, slow


def one_round(
    count: int, pairs: Pairs, bad: frozenset[int], cut: frozenset[frozenset[int]], slow: dict[int, float]
) -> tuple[Pair, ...]:
    """What real nodes would measure in one round."""
    links: list[LinkFigure] = []
    troubles: dict[int, list[str]] = {}
    for one in node_pairs.transfers(0, pairs):
        if {one.source, one.target} & bad or frozenset((one.source, one.target)) in cut:
            troubles.setdefault(one.target, []).append("timed out")
        else:
            speed = FAST * min(slow.get(one.source, 1.0), slow.get(one.target, 1.0))
            links.append(LinkFigure(one.source, one.target, "ring", 1 << 24, speed))
    return node_pairs.measured(pairs, links, troubles)


def run(
    count: int, bad: frozenset[int], cut: frozenset[frozenset[int]], slow: dict[int, float]
) -> tuple[PairsJudged, list[Pairs], tuple[Pair, ...]]:
    rounds = list(node_pairs.first_rounds(count))
    pairs = [pair for one in rounds for pair in one_round(count, one, bad, cut, slow)]
    looks = node_pairs.second_looks(count, node_pairs.merged(pairs))
    pairs += [pair for one in looks for pair in one_round(count, one, bad, cut, slow)]
    known = node_pairs.merged(pairs)
    names = [f"node-{number}" for number in range(count)]
    return node_pairs.judge_pairs(names, known), [*rounds, *looks], known


@given(clusters())
def test_only_bad_nodes_are_named_and_no_broken_link_is_forgotten(
    cluster: tuple[int, frozenset[int], frozenset[frozenset[int]], dict[int, float]],
) -> None:
    count, bad, cut, _ = cluster
    judged, rounds, known = run(count, bad, cut, {})
    named = {int(one.node[5:]) for one in judged.nodes}
    # A node whose tested links were all cut is as bad as one that reaches nobody, for all that can be seen.
    cut_off = {
        node
        for node in range(count)
        if all(
            frozenset((pair.one, pair.other)) in cut or {pair.one, pair.other} & bad
            for pair in known
            if node in (pair.one, pair.other)
        )
    }
    assert named <= bad | cut_off
    # Nothing that failed goes unsaid: each such pair is a named node's, or a line of its own.
    failed = [pair for pair in known if not pair.works and not {pair.one, pair.other} & named]
    assert len(judged.broken) == len(failed)
    for pairs in rounds:
        places = [place for pair in pairs for place in pair]
        assert len(places) == len(set(places))  # no node in two transfers at a time
    assert len(rounds) <= 3 + node_pairs.MOST_LOOKS


@given(st.integers(4, 24), st.data())
def test_a_single_bad_node_is_always_named(count: int, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, count - 1))
    judged, _, _ = run(count, frozenset({node}), frozenset(), {})
    assert [(one.node, one.is_unfit) for one in judged.nodes] == [(f"node-{node}", True)]
    assert judged.broken == ()


@given(st.integers(3, 24), st.data())
def test_a_single_slow_node_is_always_named(count: int, data: st.DataObject) -> None:
    node = data.draw(st.integers(0, count - 1))
    share = data.draw(st.floats(0.01, 0.45))
    judged, _, _ = run(count, frozenset(), frozenset(), {node: share})
    assert [(one.node, one.is_unfit) for one in judged.nodes] == [(f"node-{node}", share < 0.2)]
    assert (judged.broken, judged.slow) == ((), ())


@given(st.integers(2, 24))
def test_sound_nodes_are_left_alone_and_each_meets_two_others(count: int) -> None:
    judged, _, known = run(count, frozenset(), frozenset(), {})
    assert judged == PairsJudged()
    for node in range(count):
        partners = {pair.one + pair.other - node for pair in known if node in (pair.one, pair.other)}
        assert len(partners) == min(2, count - 1)


def test_a_good_node_between_two_bad_ones_is_cleared() -> None:
    judged, _, known = run(8, frozenset({1, 3}), frozenset(), {})
    assert {one.node for one in judged.nodes} == {"node-1", "node-3"}
    assert any(pair.works for pair in known if 2 in (pair.one, pair.other))


def test_of_two_nodes_neither_is_named() -> None:
    judged, _, _ = run(2, frozenset({1}), frozenset(), {})
    assert judged.nodes == ()
    assert judged.broken == (
        "link node-0 - node-1: no data (timed out); nothing says which of the two is at fault",
    )


@given(
    st.lists(
        st.builds(
            LinkFigure,
            st.integers(-2, 9),
            st.integers(-2, 9),
            st.just("ring"),
            st.integers(0, 9),
            st.floats(),
        )
    )
)
def test_figures_of_others_are_used_only_where_they_can_be(links: list[LinkFigure]) -> None:
    pairs = ((0, 1), (2, 3))
    found = node_pairs.measured(pairs, links, {})
    assert [(pair.one, pair.other) for pair in found] == list(pairs)
    assert all(0 < pair.bytes_per_s < float("inf") for pair in found if pair.works)
