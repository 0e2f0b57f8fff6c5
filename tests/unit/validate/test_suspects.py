"""Which groups are validated."""

from __future__ import annotations

from keepstep.core.incident import Culprit, Link
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary
from keepstep.validate.suspects import degraded_groups, suspicious_groups

GROUPS = {
    "world": GroupInfo("world", (0, 1, 2, 3, 4, 5)),
    "dp0": GroupInfo("dp0", (0, 1)),
    "dp1": GroupInfo("dp1", (2, 3)),
    "dp2": GroupInfo("dp2", (4, 5)),
}
WORLD = range(6)


def rows(**times: float) -> list[IterationSummary]:
    return [
        IterationSummary(
            rank, step, 0.0, 1.0, 0.5, 0.5,
            streams=(StreamSummary(name, 1, -1, 4, 4096, 0, 0.0, 0.1, 0.4, 0.1, time_s * (1 + rank % 2)),),
        )
        for step in range(3)
        for name, time_s in times.items()
        for rank in GROUPS[name].members
    ]  # fmt: skip


def test_a_group_slower_than_comparable_ones_is_degraded() -> None:
    assert degraded_groups(rows(dp0=0.010, dp1=0.012, dp2=0.010), GROUPS) == ("dp1",)
    assert degraded_groups(rows(dp0=0.010, dp1=0.0105, dp2=0.010), GROUPS) == ()
    assert suspicious_groups(rows(dp0=0.010, dp1=0.012, dp2=0.010), GROUPS, (), WORLD) == ((2, 3),)


def test_a_group_that_explains_little_of_the_slowdown_is_not_singled_out() -> None:
    """Four all-reduces an iteration, each 2 ms longer than its peers' in one group: 8 ms."""
    degraded = rows(dp0=0.010, dp1=0.012, dp2=0.010)
    assert suspicious_groups(degraded, GROUPS, (), WORLD, slowdown_s=0.039) == ((2, 3),)
    assert suspicious_groups(degraded, GROUPS, (), WORLD, slowdown_s=0.2) == (tuple(WORLD),)


def test_groups_of_suspected_ranks_come_first() -> None:
    suspect = Culprit(rank=5, confidence="low")
    chosen = suspicious_groups(rows(dp0=0.02, dp1=0.01, dp2=0.01), GROUPS, (suspect,), WORLD)
    assert chosen == ((4, 5), (0, 1))
    link = Culprit(link=Link((1, 2), ("a", "b")), confidence="low")
    assert suspicious_groups((), GROUPS, (link,), WORLD) == ((0, 1), (2, 3))


def test_without_a_suspicion_all_ranks_are_one_group() -> None:
    assert suspicious_groups((), GROUPS, (), WORLD) == ((0, 1, 2, 3, 4, 5),)
    assert suspicious_groups((), {}, (), ()) == ()
