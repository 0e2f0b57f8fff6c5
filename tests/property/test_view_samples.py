"""The store of samples against a twin that keeps every cell in a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many
from tests.twins.view.sample_store import DictStore

from keepstep.core.layout import ParallelLayout
from keepstep.view.samples import SampleStore
from keepstep.view.tiles import decoded, encoded, ratios, row_order

RANKS = 6
times = st.one_of(st.floats(1e-3, 10.0), st.just(0.0), st.floats(0.3, 0.32))
samples = st.tuples(st.integers(-1, RANKS - 1), st.integers(-1, 90), times, st.floats(0.0, 20.0))
reports = st.lists(
    st.tuples(st.lists(samples, min_size=1, max_size=12), st.integers(0, 2)), min_size=1, max_size=12
)


def give(store: SampleStore, rows: list[tuple[int, int, float, float]], incarnation: int) -> None:
    rank, step, own_s, iteration_s = zip(*rows, strict=True)
    store.take(
        np.array(rank, np.int32),
        np.array(step, np.int64),
        np.array(own_s, np.float32),
        np.array(iteration_s, np.float32),
        incarnation,
    )


def as_stored(rows: list[tuple[int, int, float, float]]) -> list[tuple[int, int, float, float]]:
    """Times as the arrays have them: with seven digits."""
    return [
        (rank, step, float(np.float32(own_s)), float(np.float32(all_s))) for rank, step, own_s, all_s in rows
    ]


@given(reports, st.integers(2, 24), st.sampled_from(["own", "peers"]), st.integers(1, 7))
@settings(max_examples=many(200), deadline=None)
def test_every_cell_is_that_of_the_twin(reports, most_columns, against, most_rows) -> None:
    store, twin = SampleStore(most_columns), DictStore(most_columns)
    for rows, incarnation in reports:
        give(store, rows, incarnation)
        twin.take(as_stored(rows), incarnation)
        assert (store.stride, len(store)) == (
            twin.stride,
            twin.high - twin.low + 1 if twin.columns else 0,
        )
        tile = store.tile(against=against, most_rows=most_rows)
        assert tile.first_steps.tolist() == [twin.stride * (twin.low + one) for one in range(len(store))]
        for row in range(len(tile.colours)):
            expected = [
                twin.colour(tile.ranks_of(row).tolist(), place, against) for place in range(len(store))
            ]
            # A code that lies between two may be rounded to either.
            assert np.abs(tile.colours[row].astype(int) - expected).max(initial=0) <= 1
            assert ((tile.colours[row] == 0) == (np.array(expected) == 0)).all()


@given(reports, st.integers(2, 24))
@settings(max_examples=many(100), deadline=None)
def test_the_jobs_iterations_are_those_of_the_twin(reports, most_columns) -> None:
    store, twin = SampleStore(most_columns), DictStore(most_columns)
    for rows, incarnation in reports:
        give(store, rows, incarnation)
        twin.take(as_stored(rows), incarnation)
    found = store.series().iteration_s
    for place, seconds in enumerate(found):
        column = twin.columns.get(twin.low + place)
        if column is None or not column.count:
            assert np.isnan(seconds)
        else:
            assert seconds == pytest.approx(column.iteration_s / column.count, rel=1e-5)


@given(reports, st.integers(2, 24), st.sampled_from(["own", "peers"]))
@settings(max_examples=many(200), deadline=None)
def test_what_has_changed_since_is_enough_to_follow(reports, most_columns, against) -> None:
    """A viewer that only takes what changed has the same picture as one that takes it whole."""
    store = SampleStore(most_columns)
    store.arrange(row_order(RANKS))
    seen = store.tile(against=against)
    picture: dict[int, list[int]] = {}
    for rows, incarnation in reports:
        give(store, rows, incarnation)
        news = store.changed_since(seen.version, against=against)
        if news is None:
            picture.clear()
            news = store.tile(against=against)
        picture |= dict(zip(news.columns.tolist(), news.colours.T.tolist(), strict=True))
        seen = news
        whole = store.tile(against=against)
        empty = [0] * len(whole.colours)
        assert [picture.get(one, empty) for one in range(len(store))] == whole.colours.T.tolist()


@given(st.lists(times, min_size=1, max_size=20))
@settings(max_examples=many(100), deadline=None)
def test_times_come_back_within_a_thousandth(seconds) -> None:
    given_s = np.array(seconds, np.float32)
    found = decoded(encoded(given_s))
    assert np.isnan(found).tolist() == (given_s == 0).tolist()
    there = given_s > 0
    assert found[there] == pytest.approx(given_s[there], rel=1e-3)


@given(st.floats(0.1, 10.0), st.floats(0.01, 10.0))
@settings(max_examples=many(100), deadline=None)
def test_a_colour_is_the_ratio_to_the_peers(ratio, usual_s) -> None:
    store = SampleStore()
    rows = [(rank, 0, usual_s * (ratio if rank == 2 else 1.0), 20.0) for rank in range(RANKS)]
    give(store, rows, 0)
    found = ratios(store.tile(against="peers").colours)[:, 0]
    assert found[2] == pytest.approx(ratio, rel=0.015)
    assert found[0] == pytest.approx(1.0, rel=0.015)


@pytest.mark.parametrize("text", ["tp2-dp3-pp2", "pp2-tp2-dp3", "dp3-pp2-tp2", "cp2-tp3-pp2"])
def test_rows_are_in_the_layouts_order_whatever_the_ranks_are(text: str) -> None:
    layout = ParallelLayout.declared(text)
    order = row_order(12, layout)
    assert sorted(order.ranks.tolist()) == list(range(12))
    at = [layout.coordinates(rank) for rank in order.ranks.tolist()]
    places = [(one["pp"], one["dp"], one["ep"], one["cp"], one["tp"]) for one in at]
    assert places == sorted(places)
    assert order.peers.tolist() == [one["pp"] for one in at]
    for early in (False, True):
        store = SampleStore()
        if early:
            store.arrange(order)
        give(store, [(rank, 0, 0.1, 1.0) for rank in range(12)], 0)
        give(store, [(rank, 1, 0.1 * (1 + (rank == 7)), 1.0) for rank in range(12)], 0)
        store.arrange(order)
        row = order.ranks.tolist().index(7)
        for against in ("own", "peers"):
            assert np.argwhere(store.tile(against=against).colours > 130).tolist() == [[row, 1]]
            found = store.slowest((0, 12), 1, against=against)
            assert found is not None
            assert found[0] == 7
        assert store.of_rank(7).tolist() == pytest.approx([0.1, 0.2], rel=1e-3)


@given(
    reports,
    st.lists(st.sampled_from([None, "pp2-tp3", "tp3-pp2", "dp4", "pp2-dp2"]), min_size=1),
    st.integers(2, 9),
)
@settings(max_examples=many(100), deadline=None)
def test_rows_may_be_arranged_anew_at_any_time(reports, layouts, most_columns) -> None:
    """The same rank has the same colour against itself whatever row it is in."""
    store, plain = SampleStore(most_columns), SampleStore(most_columns)
    for place, (rows, incarnation) in enumerate(reports):
        text = layouts[place % len(layouts)]
        if text is not None:
            layout = ParallelLayout.declared(text)
            store.arrange(row_order(layout.world_size, layout))
        give(store, rows, incarnation)
        give(plain, rows, incarnation)
        tile, expected = store.tile(), plain.tile().colours
        for row, rank in enumerate(tile.order.ranks.tolist()):
            if rank < plain.ranks:
                assert tile.colours[row].tolist() == expected[rank].tolist()
            else:
                assert not tile.colours[row].any()
        for rank in range(RANKS):
            assert np.array_equal(store.of_rank(rank), plain.of_rank(rank), equal_nan=True)
        assert np.array_equal(store.usual_s(), plain.usual_s())
