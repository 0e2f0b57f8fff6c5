"""What all ranks save alike is marked, and is any rank's state when the job has another size; nothing else is."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.trainings import Ranks

from keepstep.checkpoint.memory.cache import Cache
from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.memory.slot import Board, Slot, backup_of, backups_on
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.snapshot import Snapshots


@pytest.fixture
def cache(served: Any) -> Cache:
    return served.cache


def save(steps: int, strange: int = -1) -> Any:
    """Each step another state; ``strange``: the rank that saves something of its own."""

    def work(rank: int, snapshots: Snapshots) -> None:
        for step in range(1, steps + 1):
            mine = {"mine": 1.0 * (rank == strange)}
            snapshots.save({"w": torch.full((64,), float(step)), **mine}, step)

    return work


def load(rank: int, snapshots: Snapshots) -> tuple[int | None, float]:
    state = {"w": torch.zeros(64), "mine": -1.0}
    return snapshots.load(state), state["w"][0].item()


def test_a_step_is_known_to_be_alike_when_the_next_is_saved(served: Any, cache: Cache) -> None:
    Ranks(3, elastic=True).run(served, work=save(4))
    assert [cache.alike(rank) for rank in range(3)] == [{Key(0, 3)}] * 3
    assert CachedStates(served.address, range(3)).alike() == (0, {Key(0, 3)})


@pytest.mark.parametrize("strange", [0, 2])
def test_one_rank_that_differs_is_enough(served: Any, cache: Cache, strange: int) -> None:
    Ranks(3, elastic=True).run(served, work=save(4, strange))
    assert [cache.alike(rank) for rank in range(3)] == [frozenset()] * 3
    assert CachedStates(served.address, range(3)).alike() is None


def test_a_smaller_job_goes_on_with_what_was_alike_under_other_numbers(served: Any, cache: Cache) -> None:
    Ranks(4, elastic=True).run(served, work=save(5))
    cache.renumber({2: 0, 3: 1})
    assert Ranks(2, elastic=True).run(served, incarnation=1, work=load) == [(4, 4.0)] * 2
    assert [cache.alike(rank) for rank in range(4)] == [{Key(0, 4)}] * 2 + [frozenset()] * 2
    Ranks(2, elastic=True).run(
        served,
        incarnation=1,
        work=lambda rank, snapshots: (
            snapshots.load({"w": torch.zeros(64), "mine": -1.0})
            and snapshots.save({"w": torch.ones(64), "mine": 0.0}, 5)
        ),
    )
    assert Ranks(2, elastic=True).run(served, incarnation=2, work=load) == [(5, 1.0)] * 2


def test_what_was_not_alike_is_no_ranks_state_any_more(served: Any, cache: Cache) -> None:
    Ranks(4, elastic=True).run(served, work=save(5, strange=1))
    cache.renumber({2: 0, 3: 1})
    assert Ranks(2, elastic=True).run(served, incarnation=1, work=load) == [(None, 0.0)] * 2


def test_backups_and_other_ranks_are_given_up_with_their_old_numbers(served: Any, cache: Cache) -> None:
    Ranks(2, elastic=True).run(served, work=save(3))
    cache.reserve(backup_of(7), 4096, 2)
    board = Board(os.dup(cache.board))
    board.put(backup_of(7), 0, Key(0, 3))
    board.keep(Key(0, 2), Key(0, 3))
    used = cache.used_bytes
    cache.renumber({1: 5})
    assert board.held(backup_of(7)) == board.held(0) == board.held(1) == frozenset()
    assert (board.held(5), board.kept()) == ({Key(0, 2)}, (None, None))
    assert cache.used_bytes == (used - 2 * 4096) // 2
    board.close()


def test_a_node_that_plays_other_ranks_keeps_the_newest_of_its_own_for_them(
    served: Any, cache: Cache
) -> None:
    Ranks(2, elastic=True).run(served, work=save(5))
    board = Board(os.dup(cache.board))
    newest = {rank: sorted(board.held(rank))[-2:] for rank in range(2)}
    cache.leave([1])
    assert board.held(1) == frozenset()
    assert cache.slots(1) == []
    assert backups_on(cache.board) == [1]
    assert board.held(backup_of(1)) == set(newest[1])
    assert len(cache.slots(backup_of(1))) == 2
    assert not cache.backed(1)
    states = CachedStates(served.address, [0])
    with states.reading(newest[1][-1], backup_of(1)) as (_, record):
        assert record.key == newest[1][-1]
    states.close()
    cache.leave([1])  # before it has restored anything here
    assert board.held(backup_of(1)) == set(newest[1])
    assert Ranks(1, elastic=True).run(served, incarnation=1, work=load) == [(4, 4.0)]
    board.close()


def test_the_mark_counts_while_its_key_is_there(served: Any, cache: Cache) -> None:
    Ranks(1, elastic=True).run(served, work=save(3))
    slots = [Slot(os.dup(descriptor)) for descriptor in cache.slots(0)]
    assert {slot.alike() for slot in slots} == {None, Key(0, 2)}
    marked = next(slot for slot in slots if slot.alike())
    marked.clear()
    assert marked.alike() is None
    for slot in slots:
        slot.close()


def test_ranks_that_restore_alike_know_it_at_once(served: Any, cache: Cache) -> None:
    Ranks(2, elastic=True).run(served, work=save(1))
    assert cache.alike(0) == frozenset()
    assert Ranks(2, elastic=True).run(served, incarnation=1, work=load) == [(1, 1.0)] * 2
    assert [cache.alike(rank) for rank in range(2)] == [{Key(0, 1)}] * 2


def test_what_is_backed_up_of_a_rank_stays_when_it_leaves_again_before_it_saved_that_itself(
    served: Any, cache: Cache
) -> None:
    Ranks(1, elastic=True).run(served, work=save(2))
    cache.leave([0])
    Ranks(1, elastic=True).run(
        served, incarnation=1, work=lambda rank, snapshots: snapshots.save({"w": torch.ones(4)}, 9)
    )
    board = Board(os.dup(cache.board))
    left, own = board.held(backup_of(0)), board.held(0)
    old, new = max(left), max(own)
    board.keep(old, None)
    cache.leave([0])
    assert board.held(backup_of(0)) == {old, new}
    states = CachedStates(served.address, [0])
    for key in (old, new):
        with states.reading(key, backup_of(0)) as (_, record):
            assert record.key == key
    states.close()
    board.close()
