"""Which snapshots all ranks bring to storage, and how long they keep them for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.checkpoint.trainings import Ranks, alone

from keepstep.checkpoint import pace
from keepstep.checkpoint.memory.cache_server import PUT_OFF, claim
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.snapshot import Snapshots, Worker
from keepstep.checkpoint.storage import wishes as module
from keepstep.checkpoint.storage.cadence import Storing
from keepstep.core.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("copy_engine")


def test_a_step_that_waits_for_storage_outlasts_later_saves_and_a_restart(
    served: Any, empty_service: None, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshots = Snapshots(served.address, Worker(), alone, storing=Storing("/ckpt", every=0))
    for number in range(1, 8):
        snapshots.save({"w": torch.full((50,), float(number))}, number, persist=number == 2)
        assert snapshots._cache.wanted() == ({Key(0, 2)} if number > 1 else set())
    assert {key.step for key in snapshots._cache.held() if key} == {2, 6, 7}
    assert "3 snapshots of rank 0 take" in capsys.readouterr().err
    snapshots.close()
    snapshots = Snapshots(served.address, Worker(incarnation=1), alone, storing=Storing("/ckpt", every=0))
    state = {"w": torch.zeros(50)}
    assert snapshots.load(state) == 7
    assert snapshots._cache.wanted() == {Key(0, 2)}
    assert {key for key in snapshots._cache.held() if key} == {Key(0, 2), Key(0, 7)}
    snapshots.save(state, 8)
    snapshots.save(state, 9)
    assert {key for key in snapshots._cache.held() if key} == {Key(0, 2), Key(1, 8), Key(1, 9)}
    snapshots.close()


def test_what_is_to_be_brought_to_storage_without_one_is_refused(served: Any) -> None:
    snapshots = Snapshots(served.address, Worker(), alone)
    with pytest.raises(CheckpointError, match="step 1 is to be brought to storage, and there is none"):
        snapshots.save({"w": 1}, 1, persist=True)
    snapshots.close()


def test_ranks_agree_on_which_steps_go_to_storage(served: Any, empty_service: None) -> None:
    def save(rank: int, snapshots: Snapshots) -> list[list[int]]:
        said: list[list[int]] = []
        for number in range(1, 7):
            snapshots.save({"w": rank}, number)
            said.append(sorted(key.step for key in snapshots._cache.wanted()))
            if rank == 0 and number == 1:
                snapshots._cache.let_go(Key(0, 1))  # it is on storage, and rank 1 has not heard of it
            if rank == 1 and number == 4:
                snapshots._cache.let_go(Key(0, 1))
        return said

    first, second = Ranks(2).run(served, save, every=1)
    assert first == [[1], [], [], [], [5], [5]]
    assert second == [[1], [1], [1], [1], [5], [5]]


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_newest_step_of_all_is_wanted_when_the_job_ends(served: Any, ahead: int) -> None:
    def save(rank: int, snapshots: Snapshots) -> None:
        for number in range(1, 4 - (rank == 1 and not ahead)):  # a rank died before its last save
            snapshots.save({"w": rank}, number + rank * ahead)

    Ranks(2).run(served, save)
    served.cache.want_newest()
    assert served.cache.wanted() == (
        [] if ahead else [Key(0, 2)]
    )  # none of all ranks where they do not save alike


def test_of_several_newest_steps_those_are_wanted_that_all_ranks_here_have(served: Any) -> None:
    def save(rank: int, snapshots: Snapshots) -> None:
        for number in range(1, 4):
            snapshots.save({"w": rank}, number)

    Ranks(2).run(served, save)
    served.cache.want_newest(2)
    assert served.cache.wanted() == [Key(0, 2), Key(0, 3)]


def test_a_step_that_was_asked_for_in_vain_is_made_up_for_by_the_next(
    served: Any, empty_service: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "LEAST_S", 0.0)
    snapshots = Snapshots(served.address, Worker(), alone, storing=Storing("/ckpt", every=0))
    for number in range(1, 5):
        snapshots.save({"w": number}, number, persist=True if number < 3 else None)
        if number == 3:
            assert snapshots._cache.wanted() == {Key(0, 1)}
            snapshots._cache.let_go(Key(0, 1))  # it is on storage
    assert snapshots._cache.wanted() == {Key(0, 4)}
    assert not claim(served.address, PUT_OFF)  # so that the end of the run brings the last step there
    snapshots.close()


def test_where_slots_for_storage_do_not_fit_those_that_take_turns_serve(
    served: Any, empty_service: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "LEAST_S", 0.0)
    served.cache.limit_bytes = 9 << 20
    snapshots = Snapshots(served.address, Worker(), alone, storing=Storing("/ckpt", every=2))
    for number in range(1, 8):
        snapshots.save({"w": torch.ones(1 << 20)}, number)
        if number == 5:
            assert snapshots._cache.wanted() == {Key(0, 2)}
            snapshots._cache.let_go(Key(0, 2))
    assert len(snapshots._cache.slots) == 2
    assert snapshots._cache.wanted() == {Key(0, 6)}
    snapshots.close()


def test_what_one_rank_did_not_keep_is_waited_for_no_longer(
    served: Any, empty_service: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def save(rank: int, snapshots: Snapshots) -> list[int]:
        snapshots.save({"w": rank}, 1, persist=True)
        assert snapshots._wishes
        snapshots._wishes._unkept = Key(0, 1) if rank == 1 else None
        snapshots.save({"w": rank}, 2, persist=True)
        return sorted(key.step for key in snapshots._cache.wanted())

    assert Ranks(2).run(served, save, every=0) == [[2], [2]]
    assert "step 1 is not brought to storage /ckpt: rank 1 did not keep it" in capsys.readouterr().err


def test_what_not_all_ranks_hold_any_more_is_let_go_in_time(
    served: Any, empty_service: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_ALONE_S", -1.0)

    def save(rank: int, snapshots: Snapshots) -> list[list[int]]:
        snapshots.save({"w": rank}, 1, persist=True)
        if rank == 1:
            snapshots._cache.drop(0)  # the agent found it damaged
        said: list[list[int]] = []
        for number in (2, 3):
            snapshots.save({"w": rank}, number)
            said.append(sorted(key.step for key in snapshots._cache.wanted()))
        return said

    assert Ranks(2).run(served, save, every=1) == [[[], [3]], [[], [3]]]


def test_a_step_that_an_operator_wants_goes_there_once_on_all_ranks(served: Any, empty_service: None) -> None:
    def save(rank: int, snapshots: Snapshots) -> list[list[int]]:
        said: list[list[int]] = []
        for number in range(1, 8):
            if (
                rank == 0 and number == 2
            ):  # an agent orders it ahead, so that each rank has heard when it is there
                snapshots._cache.board.order(Key(0, 4))
            snapshots.save({"w": rank}, number, persist=False if number == 4 else None)
            said.append(sorted(key.step for key in snapshots._cache.wanted()))
            snapshots._gather([0])
        snapshots._cache.board.order(Key(1, 1))  # of another incarnation
        snapshots.save({"w": rank}, 8)
        said.append(sorted(key.step for key in snapshots._cache.wanted()))
        return said

    first, second = Ranks(2).run(served, save, every=0)
    # The script says that step 4 is not to go there.
    assert first == second == [[], [], [], [], [5], [5], [5], [5]]
