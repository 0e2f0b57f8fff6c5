"""Who stands out among devices and links, whatever a third of them does."""

from __future__ import annotations

import random

import pytest

from keepstep.core.validation import DeviceFigure, LinkFigure, RankFigures, Transport
from keepstep.validate.judge import best_of, cause_of, judge, link_speeds, link_transports


def devices(values: dict[int, float], test: str = "fp32") -> list[RankFigures]:
    return [RankFigures(rank, (DeviceFigure(rank, test, value),)) for rank, value in values.items()]


def links(speeds: dict[tuple[int, int], float], transport: Transport = "tcp") -> list[RankFigures]:
    return [
        RankFigures(b, links=(LinkFigure(a, b, "ring", 1 << 20, speed, transport),))
        for (a, b), speed in speeds.items()
    ]


@pytest.mark.parametrize("count", [2, 3, 4, 8, 100])
def test_a_slow_device_is_named_with_its_share(count: int) -> None:
    figures = devices({rank: 1.0 if rank == 1 else 2.0 for rank in range(count)})
    outcome = judge(range(count), figures, {})
    (slow,) = outcome.devices
    assert (slow.figure.rank, slow.median, slow.share) == (1, 2.0, 0.5)


@pytest.mark.parametrize("seed", range(20))
def test_alike_devices_accuse_nobody_and_a_third_of_bad_ones_are_all_found(seed: int) -> None:
    dice = random.Random(seed)
    values = {rank: dice.uniform(0.95, 1.05) for rank in range(20)}
    assert judge(range(20), devices(values), {}).devices == ()
    bad = dice.sample(range(20), 6)
    for rank in bad:
        values[rank] *= dice.uniform(0.1, 0.6)
    found = judge(range(20), devices(values), {}).devices
    assert sorted(slow.figure.rank for slow in found) == sorted(bad)
    assert [slow.share for slow in found] == sorted(slow.share for slow in found)


def test_a_wide_spread_is_no_accusation() -> None:
    values = {rank: 1.0 + rank / 4 for rank in range(8)}
    assert judge(range(8), devices(values), {}).devices == ()


def test_links_are_compared_with_links_of_their_kind() -> None:
    nodes = {0: "a", 1: "a", 2: "b", 3: "b"}
    speeds = {(0, 1): 9e9, (2, 3): 9e9, (1, 2): 1e9, (3, 0): 0.2e9}
    (slow,) = judge(range(4), links(speeds), nodes).links
    assert (slow.source, slow.target, slow.median) == (3, 0, 1e9)


RING = {(0, 1): 1e9, (1, 2): 1e9, (2, 3): 1e9, (3, 0): 1e9}


def named(speeds: dict[tuple[int, int], float], nodes: str = "aaaa") -> list[tuple[int, int]]:
    found = judge(range(4), links(speeds, "nccl"), dict(enumerate(nodes)))
    return [(one.source, one.target) for one in found.links]


def test_a_link_between_devices_of_a_node_is_slow_below_four_fifths() -> None:
    assert named({**RING, (2, 3): 0.85e9}) == []
    assert named({**RING, (2, 3): 0.75e9}) == [(2, 3)]


def test_links_between_devices_that_go_several_ways_accuse_nobody() -> None:
    """GPUs 0 and 1, and 2 and 3, have NVLink; what goes between these pairs goes over PCIe."""
    for count in (1, 2, 3):
        slow = dict.fromkeys(list(RING)[:count], 0.3e9)
        outcome = judge(range(4), links({**RING, **slow}, "nccl"), dict.fromkeys(range(4), "a"))
        assert len(outcome.links) == (1 if count == 1 else 0)
        assert outcome.missing == (
            ("links inside nodes: they are of several kinds, 2 of 4 much slower",) if count == 2 else ()
        )


def test_a_link_over_which_nothing_came_is_named_whatever_the_others_are() -> None:
    for speeds in ({(0, 1): 0.0}, {**RING, (1, 2): 0.0}, {**RING, (1, 2): 0.0, (0, 1): 0.3e9, (3, 0): 0.3e9}):
        assert named(speeds)[0] == next(pair for pair, speed in speeds.items() if speed == 0)
    assert judge(range(2), links({(0, 1): 0.0}, "nccl"), {}).links[0].share == 0


def test_links_over_tcp_are_no_measure_for_those_between_devices() -> None:
    figures = [*links({(0, 1): 50e9, (1, 2): 50e9}, "nccl"), *links({(2, 3): 1e9})]
    assert judge(range(4), figures, {}).links == ()
    again = [*links({(2, 3): 49e9}, "nccl"), *figures]
    assert link_speeds(again)[2, 3] == 49e9
    assert link_transports(again) == dict.fromkeys([(0, 1), (1, 2), (2, 3)], "nccl")


@pytest.mark.parametrize(("nodes", "share", "named"), [("aaaa", 0.7, 0), ("aaaa", 0.4, 1), ("abcd", 0.7, 1)])
def test_a_link_inside_a_node_must_lose_half(nodes: str, share: float, named: int) -> None:
    speeds = {(0, 1): 1e9, (1, 2): 1e9, (2, 3): share * 1e9, (3, 0): 1e9}
    found = judge(range(4), links(speeds), dict(enumerate(nodes)))
    assert [(one.source, one.target) for one in found.links] == [(2, 3)][:named]


def test_what_did_not_come_is_said() -> None:
    figures = [*devices({0: 1.0}), RankFigures(1, missing=("link 0 → 1: timed out",))]
    outcome = judge(range(3), figures, {})
    assert outcome.missing == (
        "figures of rank 2: they did not come in time",
        "rank 1: link 0 → 1: timed out",
    )
    assert outcome.devices == ()
    assert outcome.links == ()


def test_what_was_disturbed_in_one_round_only_is_not_slow() -> None:
    one, other = (RankFigures(1, (DeviceFigure(1, "fp32", value),), link) for value, link in (
        (1.0, (LinkFigure(0, 1, "ring", 4, 9e9),)), (2.0, (LinkFigure(0, 1, "ring", 4, 1e9),)))
    )  # fmt: skip
    best = best_of([one, other])
    assert (best.devices[0].value, best.links[0].bytes_per_s) == (2.0, 9e9)


def test_a_device_that_its_quota_holds_back_is_named_with_that_cause_and_its_links_are_not() -> None:
    figures = [
        RankFigures(
            rank,
            (DeviceFigure(rank, "fp32", 0.2 if rank == 1 else 2.0, limited=0.9 if rank == 1 else 0.0),),
            (LinkFigure((rank - 1) % 4, rank, "ring", 4, 1e6 if rank in (1, 3) else 1e9),),
        )
        for rank in range(4)
    ]
    outcome = judge(range(4), figures, {})
    assert [(slow.figure.rank, cause_of(slow)) for slow in outcome.devices] == [(1, "cpu quota")]
    assert [(slow.source, slow.target) for slow in outcome.links] == [(2, 3)]


def test_a_slow_device_stays_one_when_a_quota_explains_a_little_of_it_only() -> None:
    figures = [
        RankFigures(rank, (DeviceFigure(rank, "fp32", 1.0 if rank == 1 else 2.0, limited=0.1),))
        for rank in range(4)
    ]
    assert [cause_of(slow) for slow in judge(range(4), figures, {}).devices] == ["device"]


def test_a_core_that_others_had_is_said_and_nobody_accused() -> None:
    def taken(shares: dict[int, float]) -> tuple[str, ...]:
        figures = [
            RankFigures(rank, (DeviceFigure(rank, "fp32", 2.0, taken=one),)) for rank, one in shares.items()
        ]
        outcome = judge(tuple(shares), figures, dict.fromkeys(shares, "a"))
        assert outcome.devices == ()
        return outcome.missing

    assert taken({0: 0.7, 1: 0.8, 2: 0.75}) == ()
    assert taken({0: 0.02, 1: 0.51, 2: 0.0}) == (
        "rank 1: other processes had its core 51% of the test (of its peers' 2%), which its figure leaves out",
    )


def test_a_quota_is_the_cause_also_where_others_had_the_core_most_of_the_time() -> None:
    held_back = DeviceFigure(1, "fp32", 0.1, limited=0.95, taken=0.9)
    figures = [RankFigures(1, (held_back,)), *devices({0: 2.0, 2: 2.0, 3: 2.0})]
    assert [cause_of(slow) for slow in judge(range(4), figures, {}).devices] == ["cpu quota"]
