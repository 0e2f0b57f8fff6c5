"""Whether the ranks' saves match, told by counting in a store."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest.mock import Mock

from torch.distributed import HashStore

from keepstep.checkpoint.matching import Matches, Moment, same_moment
from keepstep.checkpoint.memory.slots import Key


def job(count: int, store: Any = None) -> list[Matches]:
    shared = store or HashStore()
    return [Matches(lambda: shared, rank, count, 0) for rank in range(count)]


def test_one_moment_is_told_by_the_number_of_the_save_or_by_collectives() -> None:
    for moments, same in (
        ([Moment(3, 7), Moment(3, 7)], True),
        ([Moment(3, 7), Moment(2, 7)], True),  # a rank has left a save out
        ([Moment(3, 7), Moment(3, 9)], True),  # a rank sends to others in the default group
        ([Moment(3, 7), Moment(2, 9)], False),
        ([Moment(3), Moment(2)], False),  # nobody counts collectives
        ([Moment(3), Moment(3)], True),
        ([Moment(3, 7), Moment()], True),  # not known
        ([], True),
    ):
        assert same_moment(one.pack() for one in moments) == same, moments
    assert Moment.unpack(Moment((1 << 31) - 1, 1 << 20).pack()) == Moment((1 << 31) - 1, 1 << 20)


def test_a_snapshot_is_whole_once_every_rank_has_sealed_it_at_the_same_moment() -> None:
    ranks, key = job(3), Key(0, 4)
    for number, rank in enumerate(ranks):
        assert not ranks[0].is_whole(key)
        rank.sealed(key, Moment(2, 0 if number == 1 else 8))
    assert all(rank.is_whole(key) for rank in ranks)
    other = Key(0, 5)
    for number, rank in enumerate(ranks):
        rank.sealed(other, Moment(3 + (number == 2), 9 + number))
    assert not any(rank.is_whole(other) for rank in ranks)


def test_what_a_rank_left_out_or_all_have_passed_is_dead() -> None:
    ranks = job(2)
    assert not ranks[0].is_dead(Key(0, 1))
    ranks[1].left_out(Key(0, 1))
    assert ranks[0].is_dead(Key(0, 1))
    ranks[0].sealed(Key(0, 2), Moment(2))
    ranks[0].begins(3, 3)
    assert not ranks[0].is_dead(Key(0, 2))  # the other may still seal it
    ranks[1].begins(3, 2)
    assert ranks[0].is_dead(Key(0, 2))
    ranks[0].sealed(Key(0, 3), Moment(3, 5))
    ranks[1].sealed(Key(0, 3), Moment(2, 5))
    for rank in ranks:
        rank.begins(4, 4)
    assert not ranks[0].is_dead(Key(0, 3))


def test_states_are_alike_only_with_the_same_digest() -> None:
    ranks = job(2)
    for rank in ranks:
        rank.sealed(Key(0, 1), Moment(1), digest=5)
    assert ranks[0].is_alike(Key(0, 1))
    for number, rank in enumerate(ranks):
        rank.sealed(Key(0, 2), Moment(2), digest=number + 1)
    assert ranks[0].is_whole(Key(0, 2))
    assert not ranks[0].is_alike(Key(0, 2))


def test_ranks_meet_or_all_know_that_they_do_not() -> None:
    for count in range(2, 6):
        ranks, met = job(count), dict[int, bool]()

        def come(rank: int, to: list[Matches] = ranks, into: dict[int, bool] = met) -> None:
            into[rank] = to[rank].meet("store/7", lambda _: 10.0)

        threads = [threading.Thread(target=come, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert met == dict.fromkeys(range(count), True)


def test_who_comes_too_late_is_told_and_then_waited_for_longer() -> None:
    first, late = job(2)
    asked: list[bool] = []

    def patience_s(known_late: bool) -> float:
        asked.append(known_late)
        return 0.0

    assert not first.meet("1", patience_s)
    assert not first.meet("2", patience_s)  # nobody came, so nobody is waited for
    assert not late.meet("2", patience_s)
    assert not first.meet("3", patience_s)
    assert asked == [False, False, True]  # the first of each rank, and the one after somebody came late


def test_a_rank_that_never_saves_or_saves_other_steps_is_named() -> None:
    ranks = job(3)
    ranks[0].begins(1, 1)
    assert not ranks[0].objection(missed=False)
    assert ranks[0].objection(missed=True).startswith("ranks 1-2 never saved: call save() on all ranks")
    ranks[2].begins(2, 1)
    assert (
        ranks[0].objection(missed=False).startswith("save number 1 is step 1 on rank 0 and step 2 on rank 2")
    )
    assert [rank.claim("unmatched") for rank in ranks] == [True, False, False]


def test_a_store_that_answers_no_more_tells_of_no_rank_that_it_never_saved() -> None:
    store = HashStore()
    gone = Mock(wraps=store, check=Mock(side_effect=RuntimeError("Broken pipe")))
    ranks = [Matches(lambda one=one: one, rank, 2, 0) for rank, one in enumerate((gone, store))]
    for rank in ranks:
        rank.begins(1, 1)
    assert not ranks[0].objection(missed=True)


def test_another_store_is_told_what_this_rank_has() -> None:
    stores = [HashStore(), HashStore()]
    now = [stores[0]]
    ranks = [Matches(lambda: now[0], rank, 2, 0) for rank in range(2)]
    ranks[0].sealed(Key(0, 1), Moment(1))
    now[0] = stores[1]
    ranks[1].sealed(Key(0, 1), Moment(1))
    assert not ranks[1].is_whole(Key(0, 1))
    assert ranks[0].is_whole(Key(0, 1))
    assert ranks[1].is_whole(Key(0, 1))


def test_a_store_that_fails_tells_nothing_and_costs_nothing() -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    (rank,) = job(2, Broken())[:1]
    begun_s = time.monotonic()
    rank.begins(1, 1)
    rank.sealed(Key(0, 1), Moment(1))
    rank.left_out(Key(0, 2))
    assert not rank.is_whole(Key(0, 1))
    assert not rank.is_dead(Key(0, 1))
    assert not rank.meet("x", lambda _: 0.0)
    assert rank.claim("x")
    assert time.monotonic() - begun_s < 5


def test_a_lone_rank_needs_no_store() -> None:
    rank = Matches(lambda: None, 0, 1, 0)
    rank.sealed(Key(0, 1), Moment(1), digest=3)
    assert rank.is_whole(Key(0, 1))
    assert rank.is_alike(Key(0, 1))
    assert rank.meet("x", lambda _: 0.0)
