"""Several ranks save and load together: what they agree on, and what stops all of them."""

from __future__ import annotations

import itertools
import os
import re
import threading
import time
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.trainings import Ranks

from keepstep.checkpoint import pace as module
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.pace import Pace
from keepstep.checkpoint.snapshot import Snapshots

pytestmark = pytest.mark.usefixtures("copy_engine")


def test_ranks_that_got_differently_far_resume_together(served: Any) -> None:
    def save(rank: int, snapshots: Snapshots) -> None:
        for number in range(1, 6 if rank else 5):
            snapshots.save({"w": torch.full((100,), number * 10.0 + rank)}, number)

    def load(rank: int, snapshots: Snapshots) -> tuple[int | None, float, list[Key | None]]:
        state = {"w": torch.zeros(100)}
        return snapshots.load(state), state["w"][0].item(), snapshots._cache.held()

    ranks = Ranks(3)
    ranks.run(served, save)
    for rank, (step, value, held) in enumerate(ranks.run(served, load, incarnation=1)):
        assert (step, value) == (4, 40.0 + rank)
        assert [key for key in held if key] == [Key(0, 4)]


def test_ranks_on_several_nodes_tell_each_other_what_they_hold(served: Any) -> None:
    def save(rank: int, snapshots: Snapshots) -> list[int]:
        for number in range(1, 6):
            snapshots.save({"w": rank}, number)
        return sorted(key.step for key in snapshots._cache.held() if key)

    ranks = Ranks(3)
    assert ranks.run(served, save, one_node=False) == [[4, 5]] * 3
    assert ranks.run(served, lambda _, found: found.load({"w": 0}), 1, one_node=False) == [5, 5, 5]


def test_when_one_rank_finds_damage_all_take_the_snapshot_before(served: Any) -> None:
    def save(rank: int, snapshots: Snapshots) -> None:
        for number in (1, 2):
            snapshots.save(
                {"w": torch.full((5000,), number * 10.0 + rank), "seen": [number] * number}, number
            )

    def load(rank: int, snapshots: Snapshots) -> Any:
        state = {"w": torch.zeros(5000), "seen": [0]}
        return snapshots.load(state), state["w"].unique().tolist(), state["seen"]

    ranks = Ranks(2)
    ranks.run(served, save)
    os.pwrite(served.cache.slots(1)[1], b"\xff", 7000)
    assert ranks.run(served, load, incarnation=1) == [(1, [10.0], [1]), (1, [11.0], [1])]


def test_a_rank_whose_state_differs_stops_all(served: Any) -> None:
    ranks = Ranks(2)
    ranks.run(served, lambda rank, snapshots: snapshots.save({"w": torch.ones(4)}, 1))
    said = ranks.run(
        served, lambda rank, snapshots: snapshots.load({"w": torch.ones(4 + rank)}), incarnation=1
    )
    assert said[0] == "another rank could not restore its state: see what it says"
    assert said[1].startswith(
        "w: the snapshot has float32 of (4,), the state torch.float32 of (5,); build the state as it was saved, or"
    )


def test_a_rank_without_a_snapshot_refuses_the_restore_of_all(served: Any) -> None:
    def save(rank: int, snapshots: Snapshots) -> None:
        for step in (1, 2, 3):
            snapshots.save({"w": rank}, step)

    ranks = Ranks(2)
    ranks.run(served, save)
    served.cache._slots.pop(1)
    for said in ranks.run(served, lambda rank, snapshots: snapshots.load({"w": 0}), incarnation=1):
        assert (
            "(ranks 1: nothing (never saved, or lost); ranks 0: step 2 of incarnation 0, step 3 of inc"
            in said
        )


def test_ranks_that_died_over_their_very_first_snapshot_begin_anew(
    served: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = Ranks(2)
    ranks.run(served, lambda rank, snapshots: snapshots.save({"w": rank}, 1))
    served.cache._slots.pop(1)
    assert ranks.run(served, lambda rank, snapshots: snapshots.load({"w": 0}), incarnation=1) == [None, None]
    assert "begins anew" in capsys.readouterr().err


def test_a_rank_that_saves_alone_is_told_and_keeps_what_all_may_need(
    served: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LEAST_S", 0.0)

    def save(rank: int, snapshots: Snapshots) -> list[int]:
        snapshots.save({"w": 0}, 1)
        if rank == 0:
            for number in (2, 3, 4, 5):
                snapshots.save({"w": 0}, number)
        return sorted(key.step for key in snapshots._cache.held() if key)

    assert Ranks(2).run(served, save)[0] == [1, 2]
    # Nothing is said of the first step that is left out: a rank may be late.
    assert re.search("step [45] of rank 0 was not saved: other ranks are behind", capsys.readouterr().err)


@pytest.mark.parametrize("meet", [True, False])
def test_a_rank_that_never_saves_is_named_once_and_waited_for_once(
    served: Any, capsys: pytest.CaptureFixture[str], meet: bool
) -> None:
    begun = itertools.count(1)

    def save(rank: int, snapshots: Snapshots) -> tuple[list[int], list[float]]:
        if meet:
            snapshots._pace = Pace(lambda: next(begun))  # a collective before each save
        snapshots.load({"w": 0})
        took_s: list[float] = []
        for number in range(1, 40 if rank == 0 else 1):
            begun_s = time.monotonic()
            snapshots.save({"w": 0}, number)
            took_s.append(time.monotonic() - begun_s)
        return sorted(key.step for key in snapshots._cache.held() if key), took_s

    held, took_s = Ranks(2).run(served, save)[0]
    assert held == [1, 2]
    assert sum(one >= module.LEAST_S for one in took_s) == (0 if meet else 1)
    said = [line for line in capsys.readouterr().err.splitlines() if "no checkpoint is kept" in line]
    assert len(said) == 1, said
    assert "rank 1 never saved: call save() on all ranks" in said[0]


@pytest.mark.parametrize("one_node", [True, False])
def test_steps_off_by_one_are_told_once_and_never_restored_together(
    served: Any, capsys: pytest.CaptureFixture[str], one_node: bool
) -> None:
    """Rank 1 saves as step 3 what the others save as step 2."""

    def save(rank: int, snapshots: Snapshots) -> None:
        for number in range(1, 6):
            barrier.wait()
            snapshots.save({"w": torch.full((100,), number * 1.0)}, number + (rank == 1))

    ranks, barrier = Ranks(3), threading.Barrier(3)
    ranks.run(served, save, one_node=one_node)
    said = [line for line in capsys.readouterr().err.splitlines() if "same step on all ranks" in line]
    assert len(said) == 1, said
    assert "no checkpoint is kept: save number" in said[0]
    state = {"w": torch.zeros(100)}
    assert ranks.run(served, lambda rank, found: found.load(state), 1, one_node=one_node) == [None] * 3
    assert not state["w"].any()
    assert not [line for line in capsys.readouterr().err.splitlines() if "anew" in line]  # it was said before


def test_from_steps_that_part_later_the_last_one_in_common_is_restored(served: Any) -> None:
    def save(rank: int, snapshots: Snapshots) -> None:
        for number in range(1, 8):
            barrier.wait()
            snapshots.save({"w": torch.full((100,), number * 1.0)}, number + (rank == 1 and number > 4))

    def load(rank: int, snapshots: Snapshots) -> tuple[int | None, float]:
        state = {"w": torch.zeros(100)}
        return snapshots.load(state), state["w"][0].item()

    ranks, barrier = Ranks(2), threading.Barrier(2)
    ranks.run(served, save)
    assert ranks.run(served, load, 1) == [(4, 4.0)] * 2


def test_a_rank_that_skips_a_save_is_matched_again_by_collectives(served: Any) -> None:
    def save(rank: int, snapshots: Snapshots) -> None:
        met = itertools.count(1)
        snapshots._pace = Pace(lambda: next(met))
        for number in range(1, 8):
            barrier.wait()
            if rank == 1 and number == 3:
                snapshots._pace.note(0.0)  # the collective of a step that is not saved
                continue
            snapshots.save({"w": torch.full((100,), number * 1.0)}, number)

    ranks, barrier = Ranks(2), threading.Barrier(2)
    ranks.run(served, save)
    assert ranks.run(served, lambda _, found: found.load({"w": torch.zeros(100)}), 1) == [7, 7]


def test_ranks_at_different_speeds_have_snapshots_in_common_again_and_again(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast rank saves three times while the slow one saves once, and nobody waits."""
    monkeypatch.setattr(module, "LEAST_S", 0.0)
    turn = threading.Barrier(2)
    whole: list[int] = []

    def save(rank: int, snapshots: Snapshots) -> None:
        at = 0
        for _ in range(30):
            turn.wait()
            for _ in range(1 if rank else 3):
                at += 1
                snapshots.save({"w": rank}, at)
            if rank:
                newest = snapshots._newest_whole()
                whole.append(newest.step if newest else 0)

    Ranks(2).run(served, save)
    assert len(set(whole)) >= 4, whole
