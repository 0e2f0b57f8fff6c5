import numpy as np
import pytest

from keepstep.view.samples import SampleStore
from keepstep.view.tiles import row_order


def give(store: SampleStore, step: int, own_s: list[float], incarnation: int = 0) -> None:
    count = len(own_s)
    store.take(
        np.arange(count, dtype=np.int32),
        np.full(count, step, np.int64),
        np.array(own_s, np.float32),
        np.full(count, 1.0, np.float32),
        incarnation,
        np.full(count, 100.0 + step),
    )


def healthy(steps: int, ranks: int = 4, most_columns: int = 384) -> SampleStore:
    store = SampleStore(most_columns)
    for step in range(steps):
        give(store, step, [0.5] * ranks)
    return store


def test_a_slow_rank_is_seen_against_itself_and_its_peers() -> None:
    store = healthy(20)
    for step in range(20, 30):
        give(store, step, [0.5, 0.5, 1.0, 0.5])
    for against in ("own", "peers"):
        colours = store.tile(against=against).colours
        assert (colours[2, 20:] == 160).all()  # twice as long
        colours[2, 20:] = 128
        assert (colours == 128).all()
    assert store.slowest((0, 4), 25) == (2, pytest.approx(1.0, rel=1e-3), pytest.approx(2.0, rel=2e-3))
    assert store.slowest((0, 2), 25, against="peers") == (0, pytest.approx(0.5, rel=1e-3), pytest.approx(1.0))
    assert store.slowest((0, 4), 99) is None


def test_a_rank_stays_slow_in_the_picture_while_it_is_for_most_of_the_run() -> None:
    store = healthy(40)
    for step in range(40, 120):
        give(store, step, [0.5, 0.5, 1.0, 0.5])
    assert (store.tile().colours[2, 45:] == 160).all()


def test_all_that_are_slower_differ_from_themselves_and_not_from_their_peers() -> None:
    store = healthy(20)
    give(store, 20, [1.0] * 4)
    assert (store.tile().colours[:, 20] == 160).all()
    assert (store.tile(against="peers").colours == 128).all()


def test_a_long_run_is_kept_whole() -> None:
    store = healthy(1000, most_columns=16)
    give(store, 1000, [0.5, 2.0, 0.5, 0.5])
    assert store.stride == 64
    assert store.first_steps.tolist() == list(range(0, 1001, 64))
    assert (store.tile().colours[1] > 0).all()
    assert store.tile().colours[1, -1] == 192


def test_steps_that_are_made_again_replace_the_lost_ones() -> None:
    store = healthy(20)
    give(store, 20, [4.0] * 4)
    give(store, 18, [1.0] * 4, incarnation=1)
    give(store, 19, [9.0] * 4)  # told late by the incarnation before
    assert store.marks == [(0, 0), (1, 18)]
    tile = store.tile()
    assert tile.incarnations.tolist() == [0] * 18 + [1, 0, 0]
    assert (tile.colours[:, 18] == 160).all()
    give(store, 19, [0.5] * 4, incarnation=1)
    assert (store.tile().colours[:, 19] == 128).all()


def test_a_job_that_was_restored_begins_at_its_step() -> None:
    store = SampleStore(16)
    give(store, 1_000_000, [0.5] * 2)
    give(store, 1_000_004, [0.5] * 2)
    assert (store.stride, store.first_steps.tolist()) == (1, list(range(1_000_000, 1_000_005)))
    assert store.tile().colours.tolist() == [[128, 0, 0, 0, 128]] * 2
    give(store, 999_999, [0.5] * 2)  # heard later
    assert store.first_steps[0] == 999_999


def test_a_job_of_another_world_size_goes_on_in_the_same_picture() -> None:
    store = healthy(5, ranks=4)
    for step in range(5, 9):
        give(store, step, [0.5] * 6, incarnation=1)
    assert store.tile().colours.shape == (6, 9)
    assert (store.tile().colours[4:, :5] == 0).all()
    store.arrange(row_order(2))
    assert store.tile().colours.shape == (2, 9)


def test_a_row_of_many_ranks_shows_the_slowest() -> None:
    store = healthy(10, ranks=10)
    give(store, 10, [0.5] * 9 + [1.0])
    tile = store.tile(most_rows=3)
    assert tile.row_starts.tolist() == [0, 4, 8, 10]
    assert tile.ranks_of(2).tolist() == [8, 9]
    assert tile.colours[:, 10].tolist() == [128, 128, 160]


def test_a_part_can_be_looked_at_closely() -> None:
    store = healthy(10, ranks=10)
    give(store, 10, [0.5] * 9 + [1.0])
    tile = store.tile((8, 99), (9, 99))
    assert tile.colours.tolist() == [[128, 128], [128, 160]]
    assert (tile.columns.tolist(), tile.first_steps.tolist()) == ([9, 10], [9, 10])
    coarse = store.tile(most_columns=4)
    assert (coarse.steps, coarse.first_steps.tolist()) == (3, [0, 3, 6, 9])
    assert coarse.colours[9].tolist() == [128, 128, 128, 160]


def test_what_makes_no_sense_is_left_out() -> None:
    store = SampleStore()
    store.take(
        np.array([-1, 1 << 20, 0, 1, 2, 3], np.int32),
        np.array([0, 0, -1, 1 << 60, 0, 0], np.int64),
        np.array([1, 1, 1, 1, np.nan, 1], np.float32),
        np.array([1, 1, 1, 1, 1, np.inf], np.float32),
    )
    assert len(store) == 0
    assert store.tile().colours.shape == (0, 0)
    assert store.series().iteration_s.shape == (0,)
    assert store.changed_since(0) is not None


def test_a_step_from_far_away_does_not_break_the_picture() -> None:
    store = healthy(10)
    give(store, 1 << 52, [0.5] * 4)
    assert len(store) <= 384
    assert store.tile().colours.max() == 128


def test_the_jobs_series_tell_what_was_lost_and_waited() -> None:
    store = SampleStore()
    for step in range(20):
        iteration_s = 2.0 if step >= 15 else 1.0
        store.take(
            np.arange(2, dtype=np.int32),
            np.full(2, step, np.int64),
            np.full(2, 0.5, np.float32),
            np.full(2, iteration_s, np.float32),
            start_unix_s=np.full(2, 100.0 + step),
        )
    series = store.series()
    assert series.iteration_s.tolist() == [1.0] * 15 + [2.0] * 5
    assert series.waiting.tolist() == [0.5] * 15 + [0.75] * 5
    assert series.lost.tolist() == [0.0] * 15 + [0.5] * 5
    assert series.start_unix_s.tolist() == [100.0 + step for step in range(20)]


def test_one_rank_can_be_asked_for() -> None:
    store = healthy(3)
    give(store, 4, [0.5, 1.0, 0.5, 0.5])
    assert store.of_rank(1).tolist() == pytest.approx([0.5, 0.5, 0.5, np.nan, 1.0], rel=1e-3, nan_ok=True)
    assert np.isnan(store.of_rank(77)).all()
    assert store.usual_s().tolist() == pytest.approx([0.5] * 4, rel=1e-3)


def test_memory_is_bounded_whatever_the_world_size() -> None:
    store = SampleStore()
    store.reserve(1 << 20)
    for step in range(100):
        store.take(
            np.array([(1 << 20) - 1], np.int32),
            np.array([step]),
            np.array([0.5], np.float32),
            np.array([1.0], np.float32),
        )
    assert len(store) <= 48
    assert store._block.nbytes <= 101 << 20  # pyright: ignore[reportPrivateUsage]
