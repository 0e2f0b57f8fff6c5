from dataclasses import replace

import numpy as np

from keepstep.view.beats import BeatIntake
from keepstep.view.run_snapshot import RankTable
from keepstep.view.samples import SampleStore


def table(step: list[int], own_s: float = 0.5) -> RankTable:
    count = len(step)
    times = np.full(count, 1.0, np.float32)
    return RankTable(
        np.arange(count, dtype=np.int32), np.zeros(count, np.int32), np.array(step), np.zeros(count, np.int16),
        times, times * np.float32(own_s), np.zeros(count, np.float32), np.zeros(count, np.float32),
        np.ones(count, np.bool_), np.ones(count, np.bool_),
    )  # fmt: skip


def test_each_iteration_is_taken_once() -> None:
    store = SampleStore()
    beats = BeatIntake(store)
    beats.take(table([3, 3]), 0, 100.0)
    version = store.version
    beats.take(table([3, 3]), 0, 101.0)
    assert store.version == version
    beats.take(table([4, 3]), 0, 102.0)
    assert store.series().start_unix_s.tolist() == [99.0, 101.0]
    assert store.tile().colours.tolist() == [[128, 128], [128, 0]]


def test_the_same_step_of_another_incarnation_is_new() -> None:
    store = SampleStore()
    beats = BeatIntake(store)
    beats.take(table([3, 3]), 0, 100.0)
    beats.take(table([3, 3], 0.25), 1, 101.0)
    assert store.of_rank(0).round(3).tolist() == [0.25]


def test_ranks_that_have_made_no_step_are_left_out() -> None:
    store = SampleStore()
    beats = BeatIntake(store)
    beats.take(table([]), 0, 100.0)
    beats.take(replace(table([-1, 0]), iteration_s=np.array([0, 1], np.float32)), 0, 100.0)
    assert store.tile().colours.tolist() == [[0], [128]]
    beats.take(table([1, 1, 1, 1]), 0, 101.0)  # more ranks than before
    assert store.tile().colours[:, 1].tolist() == [128] * 4
