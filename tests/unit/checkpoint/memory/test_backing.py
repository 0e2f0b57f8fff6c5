"""What backups ask of a node's cache: slots, locks of one's own, and what workers keep."""

from __future__ import annotations

from contextlib import closing

import pytest
from tests.unit.checkpoint.conftest import Served, serving
from tests.unit.checkpoint.sealed_slots import seal_state, stands
from tests.unit.checkpoint.stored_states import sample_state

from keepstep.checkpoint.memory.cache import Backing
from keepstep.checkpoint.memory.cache_server import GiveUp, Open, Reserve, ask
from keepstep.checkpoint.memory.rank_slots import RankSlots
from keepstep.checkpoint.memory.slot import MOST_RANKS, Board, Slot, backup_of, backups_on
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.snapshot import Snapshots, Worker
from keepstep.core.errors import CheckpointError


def board_of(served: Served) -> Board:
    return Board(ask(served.address, Open(0)).board)


def snapshots(served: Served) -> Snapshots:
    return Snapshots(served.address, Worker(), lambda row: [row])


def test_a_rank_gets_two_slots_more_where_there_is_room_for_all_of_it() -> None:
    with serving(1 << 20, Backing(ranks=2, copies=1)) as served:
        assert (
            len(ask(served.address, Reserve(0, 80_000, 2)).slots) == 4
        )  # 2 * (2 + 2 + 2) * 80,000 bytes fit
        assert len(ask(served.address, Reserve(1, 90_000, 2)).slots) == 2
        assert len(ask(served.address, Reserve(0, 80_000, 4)).slots) == 4
        assert len(ask(served.address, Reserve(backup_of(7), 1000, 2)).slots) == 2


def test_slots_that_are_enough_for_backups_by_chance_are_not_for_backups() -> None:
    with serving(1 << 20, Backing(ranks=1, copies=1)) as served:
        seal_state(served.address, 0, {"w": "a" * 160_000}, Key(0, 2), slots=3)  # no room for two more
        assert not ask(served.address, Reserve(0, 100, 4, keep=(0, 1, 2))).backed  # one more, for a fetch
        with closing(RankSlots(served.address, 0)) as rank_slots, closing(board_of(served)) as board:
            rank_slots.settle(Key(0, 2))
            assert board.kept() == (None, None)
        assert ask(served.address, Reserve(1, 100, 3)).backed
        assert ask(served.address, Open(1)).backed


@pytest.mark.parametrize(("room", "lacks"), [(10, 0), (9, 1), (6, 4)])
def test_a_node_says_what_it_lacks_for_other_ranks_beside_what_its_own_leave(room: int, lacks: int) -> None:
    size = 1 << 16
    with serving(room * size, Backing(ranks=1, copies=1)) as served:
        assert len(ask(served.address, Reserve(0, size, 2)).slots) == 4
        ask(served.address, Reserve(backup_of(5), size, 2))
        assert served.cache.lacks([0]) == lacks * size
        if lacks:
            return
        with closing(board_of(served)) as board:
            for index in range(4):
                board.put(0, index, Key(0, index + 1))
            board.keep(Key(0, 1), None)
        served.cache.leave([0])
        assert ask(served.address, Reserve(9, size, 2)).backed
        assert len(served.cache.slots(9)) == 4


def test_without_backups_nobody_gets_more() -> None:
    with serving(1 << 20, Backing(ranks=2, copies=0)) as served:
        assert len(ask(served.address, Reserve(0, 1000, 2)).slots) == 2


def test_what_workers_keep_outlives_who_said_so(served: Served) -> None:
    with closing(board_of(served)) as board:
        assert board.kept() == (None, None)
        board.keep(Key(1, 5), Key(1, 9))
    with closing(board_of(served)) as board:
        assert board.kept() == (Key(1, 5), Key(1, 9))
        board.keep(None, None)
        assert board.kept() == (None, None)


def test_saving_goes_on_around_what_is_kept() -> None:
    with serving(1 << 28, Backing(1, 1)) as served, closing(snapshots(served)) as worker:
        for step in (1, 2, 3):
            worker.save(sample_state(step), step, overlap=False)
        with closing(board_of(served)) as board:
            board.keep(Key(0, 2), Key(0, 5))
            for step in range(4, 12):
                worker.save(sample_state(step), step, overlap=False)
            held = board.held(0)
            assert held == {Key(0, step) for step in (2, 5, 10, 11)}
            board.keep(Key(0, 5), Key(0, 11))
            for step in range(12, 16):
                worker.save(sample_state(step), step, overlap=False)
            assert board.held(0) == {Key(0, step) for step in (5, 11, 14, 15)}


def test_after_a_restore_what_is_backed_up_stays_if_it_is_older() -> None:
    with serving(1 << 28, Backing(1, 1)) as served:
        with closing(snapshots(served)) as worker, closing(board_of(served)) as board:
            for step in (1, 2, 3, 4):
                worker.save(sample_state(step), step, overlap=False)
                board.keep(Key(0, 1), None)
        with closing(RankSlots(served.address, 0)) as rank_slots:
            rank_slots.settle(Key(0, 3))
            assert set(rank_slots.held()) == {Key(0, 1), Key(0, 3), None}
            rank_slots.settle(None)
            assert set(rank_slots.held()) == {None}


def test_what_was_restored_is_kept_until_the_agent_knows_better() -> None:
    with serving(1 << 28, Backing(1, 1)) as served, closing(board_of(served)) as board:
        with closing(snapshots(served)) as worker:
            for step in (1, 2):
                worker.save(sample_state(step), step, overlap=False)
            assert board.kept() == (None, None)
        with closing(RankSlots(served.address, 0)) as rank_slots:
            rank_slots.settle(Key(0, 2))
        assert board.kept() == (None, Key(0, 2))


def test_the_board_tells_of_which_ranks_there_are_backups(served: Served) -> None:
    answer = ask(served.address, Open(0))
    assert backups_on(answer.board) == []
    for rank in (3, 4, 700):
        seal_state(served.address, backup_of(rank), {"step": 1}, Key(0, 1))
    seal_state(served.address, 5, {"step": 1}, Key(0, 1))
    with closing(board_of(served)) as board:
        board.keep(Key(0, 1), None)
    assert backups_on(answer.board) == [3, 4, 700]
    Board(answer.board).close()


def test_slots_of_a_backup_can_be_given_up_those_of_a_rank_cannot(served: Served) -> None:
    data = seal_state(served.address, backup_of(3), {"step": 1}, Key(0, 1))
    assert stands(served.address, backup_of(3)) == {Key(0, 1): data}
    with closing(board_of(served)) as board:
        board.put(backup_of(3), 0, None)
    ask(served.address, GiveUp(backup_of(3))).close()
    assert served.cache.used_bytes == 0
    assert stands(served.address, backup_of(3)) == {}
    with pytest.raises(CheckpointError, match=f">= {MOST_RANKS}"):
        ask(served.address, GiveUp(3))


def test_a_lock_apart_is_not_ended_by_another_map_of_the_process(served: Served) -> None:
    descriptors = [ask(served.address, Reserve(0, 1000, 1)).slots[0] for _ in range(4)]
    one, other, plain = (Slot(d, apart=True) for d in descriptors[:3])
    assert one.lock(shared=True)
    assert other.lock(shared=True)
    other.close()
    Slot(descriptors[3]).close()
    assert not plain.lock()
    one.unlock()
    assert plain.lock()
    assert not one.lock(shared=True)
    one.close()
    plain.close()
