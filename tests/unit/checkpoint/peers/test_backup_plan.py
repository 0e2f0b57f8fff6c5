"""Who backs up whom, and which snapshot is next."""

from __future__ import annotations

from keepstep.checkpoint.memory.slots import Key, free_slots, kept_slots
from keepstep.checkpoint.peers.backup_plan import BackupPlan, Order, Stock, places_of, ring_of


def keys(*steps: int) -> frozenset[Key]:
    return frozenset(Key(0, step) for step in steps)


def test_without_labels_the_ring_is_in_the_order_of_the_nodes() -> None:
    assert ring_of({3, 1, 0, 2}) == [0, 1, 2, 3]


def test_each_node_backs_up_as_many_as_it_is_backed_up_by() -> None:
    ring = ring_of(range(7))
    for copies in (1, 2, 3):
        backs = [
            place for at, node in enumerate(ring) for place in places_of(node, ring, at, range(7), copies)[1:]
        ]
        assert all(backs.count(node) == copies for node in range(7))


def test_from_the_first_save_to_the_second_target() -> None:
    plan = BackupPlan(1)
    stocks = {0: Stock(keys(1, 2)), 1: Stock(keys(1, 2, 3))}
    assert set(plan.orders(stocks, stocks).values()) == {
        Order(first=Key(0, 2), backs=(1,)), Order(first=Key(0, 2), backs=(0,))
    }  # fmt: skip
    stocks = {0: Stock(keys(2, 3), first=Key(0, 2)), 1: Stock(keys(2, 3), first=Key(0, 2))}
    orders = plan.orders(stocks, stocks)
    assert orders[0] == Order(None, Key(0, 2), Key(0, 2), ((1, (1,)),), (1,))
    stocks = {
        0: Stock(keys(2, 4), {1: keys(2)}, first=Key(0, 2)),
        1: Stock(keys(2, 4), {0: keys(2)}, first=Key(0, 2)),
    }
    orders = plan.orders(stocks, stocks)
    assert plan.complete == Key(0, 2)
    assert orders[1] == Order(Key(0, 2), Key(0, 4), None, (), (0,), settled=True)


def test_when_some_had_passed_the_first_one_a_later_one_is_looked_for() -> None:
    plan = BackupPlan(1)
    stocks = {0: Stock(keys(5)), 1: Stock(keys(5))}
    assert plan.orders(stocks, stocks)[0].first == Key(0, 5)
    stocks = {0: Stock(keys(5, 9), first=Key(0, 5)), 1: Stock(keys(7, 9), first=Key(0, 5))}
    assert plan.orders(stocks, stocks)[0].first == Key(0, 11)
    stocks = {0: Stock(keys(11, 12), first=Key(0, 11)), 1: Stock(keys(10), first=Key(0, 11))}
    assert plan.orders(stocks, stocks)[0].target is None  # the other will have it
    stocks = {0: Stock(keys(11, 12), first=Key(0, 11)), 1: Stock(keys(11, 12), first=Key(0, 11))}
    assert plan.orders(stocks, stocks)[0].target == Key(0, 11)


def test_a_lost_nodes_states_are_copied_once_more_and_its_backups_made_anew() -> None:
    plan = BackupPlan(1)
    plan.keep = Key(0, 2)
    stocks = {
        0: Stock(keys(2, 5), {2: keys(2)}, keep=Key(0, 2)),
        2: Stock(keys(2, 5), {1: keys(2)}, keep=Key(0, 2)),
    }
    orders = plan.orders(range(3), stocks)
    assert orders[2].pulls == ((0, (0,)),)
    assert orders[0].pulls == ((1, (2,)),)
    assert orders[0].keep == orders[0].target == Key(0, 2)


def test_a_new_controller_takes_over_what_workers_keep() -> None:
    plan = BackupPlan(1)
    stocks = {
        0: Stock(keys(2, 8, 9), {1: keys(2)}, keep=Key(0, 2)),
        1: Stock(keys(2, 8, 9), {}, keep=Key(0, 2)),
    }
    orders = plan.orders(stocks, stocks)
    assert orders[0].keep == orders[0].target == Key(0, 2)
    assert orders[1].pulls == ((0, (0,)),)


def test_a_node_without_slots_stops_backups_but_nothing_is_given_up() -> None:
    plan = BackupPlan(1)
    stocks = {0: Stock(keys(2, 3), keep=Key(0, 2)), 1: Stock(keys(2, 3), able=False)}
    orders = plan.orders(stocks, stocks)
    assert orders[0] == Order(keep=Key(0, 2), backs=(1,))


def test_what_workers_keep_leaves_them_two_slots() -> None:
    held = [Key(0, 2), Key(0, 5), Key(0, 6), Key(0, 7)]
    assert kept_slots(held, Key(0, 2), Key(0, 4)) == {0, 1}
    assert kept_slots(held, Key(0, 2), Key(0, 2)) == {0}
    assert kept_slots(held, Key(0, 1), Key(0, 8)) == set()
    assert kept_slots(held[:3], Key(0, 2), Key(0, 4)) == {0}  # not both, or saving could not go on
    assert kept_slots(held[:3], Key(0, 2), None) == {0}


def test_a_slot_that_waits_for_storage_is_none_of_the_two() -> None:
    held = [Key(0, 2), Key(0, 5), Key(0, 6), Key(0, 7)]
    assert kept_slots(held, Key(0, 2), Key(0, 5), {2}) == {0, 2}  # what is backed up goes first
    assert kept_slots(held, None, Key(0, 5), {2}) == {1, 2}
    assert kept_slots(held, Key(0, 2), Key(0, 6), {2}) == {0, 2}
    assert kept_slots(held, Key(0, 2), Key(0, 5), {2, 3}) == {2, 3}
    assert kept_slots([*held, None], Key(0, 2), Key(0, 5), {2}) == {0, 1, 2}


def test_a_backup_never_overwrites_what_is_kept_or_on_its_way() -> None:
    assert free_slots([None, Key(0, 2)], (Key(0, 2), Key(0, 5))) == [0]
    assert free_slots([Key(0, 2), Key(0, 4)], (Key(0, 2), Key(0, 5))) == [1]
    assert free_slots([Key(0, 2), Key(0, 5)], (Key(0, 2), Key(0, 5))) == []
    assert free_slots([Key(0, 4), Key(0, 1), None], (None, Key(0, 5))) == [2, 1, 0]
    assert free_slots([Key(0, 4), None, Key(0, 1), None]) == [1, 3]


def test_what_stands_everywhere_by_chance_is_backed_up_once_no_worker_overwrites_it() -> None:
    plan = BackupPlan(1)
    plan.keep = Key(0, 2)
    backups = {0: {1: keys(7)}, 1: {0: keys(7)}}  # two nodes have exchanged their ranks, and restored step 7
    stocks = {node: Stock(keys(7, 8), backups[node], keep=Key(0, 2)) for node in (0, 1)}
    plan.orders(stocks, stocks)
    assert plan.complete is None
    stocks = {node: Stock(keys(7, 8), backups[node], Key(0, 2), Key(0, 7)) for node in (0, 1)}
    plan.orders(stocks, stocks)
    assert plan.complete == Key(0, 7)
