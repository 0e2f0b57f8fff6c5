"""Which operations are picked to compare clocks with."""

from __future__ import annotations

import numpy as np

from keepstep.agent.ranks.clocks import MOST_PER_GROUP, ClockSampler
from keepstep.core.events import Flag, Kind, Op
from keepstep.core.summary import GroupInfo
from keepstep.ring import RECORD

GROUPS = (GroupInfo("node", (0, 1)), GroupInfo("all", (0, 1, 2, 3)), GroupInfo("pair", (1, 2)))


def rows(
    group: int, seqs: range, *, kind: Kind = Kind.COLLECTIVE, op: Op = Op.ALLREDUCE, peer: int = -1
) -> np.ndarray:
    made = np.zeros(len(seqs), RECORD)
    made["group"], made["kind"], made["op"], made["peer"] = group, kind, op, peer
    made["seq"] = list(seqs)
    made["start_ns"] = made["seq"].astype(np.int64) * 1000
    made["end_ns"] = made["start_ns"] + 10
    return made


def sampler(rank: int) -> ClockSampler:
    made = ClockSampler(rank, (0, 1))
    made.know(GROUPS)
    return made


def test_only_groups_beyond_the_node_and_only_their_lowest_rank_here() -> None:
    low, high = sampler(0), sampler(1)
    for one in (low, high):
        one.take(rows(0, range(1, 40)))
        one.take(rows(1, range(1, 40)))
    assert {(sample.group, sample.rank) for sample in low.drain()} == {("all", 0)}
    assert high.drain() == ()


def test_point_to_point_is_sampled_by_both_ends_with_peers_on_other_nodes() -> None:
    one = sampler(1)
    one.take(rows(2, range(1, 40), kind=Kind.P2P, op=Op.SEND, peer=2))
    one.take(rows(1, range(1, 40), kind=Kind.P2P, op=Op.SEND, peer=0))
    assert {(sample.group, sample.peer, sample.seq) for sample in one.drain()} == {
        ("pair", 2, 16),
        ("pair", 2, 32),
    }


def test_strides_follow_the_rate_and_nest() -> None:
    slow, fast = sampler(0), sampler(0)
    seqs: dict[str, set[int]] = {"slow": set(), "fast": set()}
    for second in range(20):
        slow.take(rows(1, range(2 * second + 1, 2 * second + 3)))
        fast.take(rows(1, range(1000 * second + 1, 1000 * second + 1001)))
        told = slow.drain(), fast.drain()
        seqs["slow"] |= {sample.seq for sample in told[0]}
        assert len(told[1]) <= MOST_PER_GROUP
        seqs["fast"] |= {sample.seq for sample in told[1]}
    assert {30, 32, 34, 36, 38, 40} <= seqs["slow"]
    late = [seq for seq in seqs["fast"] if seq > 10_000]
    assert late
    assert all(seq % 128 == 0 for seq in late)


def test_what_a_device_moves_is_left_out() -> None:
    one, moved = sampler(0), rows(1, range(1, 40))
    moved["flags"] = Flag.END_BY_WAIT | Flag.ON_DEVICE
    one.take(moved)
    assert one.drain() == ()


def test_failed_and_one_sided_operations_are_left_out() -> None:
    one = sampler(0)
    failed = rows(1, range(16, 17))
    failed["flags"] = Flag.FAILED
    one.take(failed)
    one.take(rows(1, range(32, 33), op=Op.BROADCAST))
    assert one.drain() == ()
    assert one.recent() == ()
