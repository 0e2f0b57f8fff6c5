"""What a node writes next: order, pins, tries, removal; by the clock of the test."""

from __future__ import annotations

from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.storage.persist_plan import Backoff, Conclude, PersistPlan, Remove, Task, WriteShard

OLD, NEW = Key(0, 10), Key(0, 20)


def plan(*ranks: int, leader: bool = True) -> PersistPlan:
    return PersistPlan(ranks or (0,), leader=leader, backoff=Backoff(1.0, 8.0))


def next_done(one: PersistPlan, now_s: float = 0.0) -> Task | None:
    task = one.next(now_s)
    if task:
        one.done(task)
    return task


def test_shards_then_the_manifest_oldest_step_first() -> None:
    one = plan(0, 1)
    one.want([NEW, OLD])
    for key in (NEW, OLD):
        for rank in (0, 1):
            one.cached |= {(key, rank)}
    found = [next_done(one) for _ in range(7)]
    shards = [WriteShard(key, rank) for key in (OLD, NEW) for rank in (0, 1)]
    assert found == [*shards, Conclude(OLD), Conclude(NEW), None]
    assert one.whole == {OLD, NEW}
    assert one.troubles(0.0) == []


def test_a_later_save_never_discards_a_pending_one() -> None:
    one = plan()
    one.want([OLD])
    one.cached |= {(OLD, 0)}
    task = one.next(0.0)
    assert task
    one.failed(task, "No space left on device", 0.0)
    for step in range(11, 40):
        one.cached |= {(Key(0, step), 0)}
    one.want([OLD, NEW])
    assert one.pinned == {OLD, NEW}
    assert one.next(0.0) == WriteShard(NEW, 0)
    assert one.next(100.0) == WriteShard(OLD, 0)
    one.want([NEW])
    assert one.pinned == {NEW}


def test_tries_are_spaced_doubled_and_told() -> None:
    one = plan()
    one.want([OLD])
    one.cached |= {(OLD, 0)}
    now_s, gaps = 0.0, []
    for _ in range(7):
        task = one.next(now_s)
        assert task == WriteShard(OLD, 0)
        assert isinstance(task, WriteShard)
        assert one.next(now_s) is None
        one.failed(task, "OSError: [Errno 28] No space left on device", now_s)
        due_s = one.wake_s()
        assert due_s
        assert one.next(due_s - 0.001) is None
        gaps.append(due_s - now_s)
        now_s = due_s
    for gap, longest in zip(gaps, (1, 2, 4, 8, 8, 8, 8), strict=True):
        assert longest / 2 <= gap <= longest
    (line,) = one.troubles(now_s)
    assert line.startswith(
        "step 10 (incarnation 0): rank 0's part is not on storage after 7 tries: OSError: [Errno 28] No space"
    )


def test_waiting_for_other_nodes_is_no_failure() -> None:
    one = plan(leader=False)
    one.want([OLD])
    one.cached |= {(OLD, 0)}
    next_done(one)
    task = one.next(0.0)
    assert task == Conclude(OLD)
    assert isinstance(task, Conclude)
    one.waits(task, 0.0)
    assert one.next(0.5) is None
    assert one.troubles(0.5) == []
    assert one.pinned == {OLD}
    assert one.next(1.0) == Conclude(OLD)
    one.waits(task, 1.0)
    assert one.wake_s() == 3.0


def test_what_is_in_no_cache_is_told() -> None:
    one = plan(0, 1)
    one.want([OLD])
    one.cached |= {(OLD, 0)}
    assert one.troubles(0.0) == [
        "step 10 (incarnation 0): wanted on storage, but not in the cache of ranks 1"
    ]
    one.cached -= {(OLD, 0)}
    assert one.next(0.0) is None
    assert one.pinned == frozenset()


def test_only_older_steps_are_removed_once_a_newer_wanted_one_is_whole() -> None:
    one = plan()
    one.listed({Key(0, 1): True, Key(0, 2): False, Key(0, 30): True})
    one.want([NEW], remove_others=True)
    assert one.next(0.0) is None
    one.cached |= {(NEW, 0)}
    assert [next_done(one) for _ in range(5)] == [
        WriteShard(NEW, 0), Conclude(NEW), Remove(Key(0, 1)), Remove(Key(0, 2)), None,
    ]  # fmt: skip
    follower = plan(leader=False)
    follower.listed({Key(0, 1): True, NEW: True})
    follower.want([NEW], remove_others=True)
    assert follower.next(0.0) is None
