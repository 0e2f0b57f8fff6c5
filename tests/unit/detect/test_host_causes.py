from __future__ import annotations

import pytest

from keepstep.core.cpu_counters import CpuCounters
from keepstep.core.summary import HostCause
from keepstep.detect import host_cause

BEGIN = CpuCounters(3 * 10**9, 7, 500_000)


def lost(
    seconds: float, *, queued_s: float = 0.0, periods: int = 0, throttled_s: float = 0.0
) -> HostCause | None:
    """The host's part in a window of so many seconds in which the counters of rank 3 grew by this much."""
    end = CpuCounters(
        BEGIN.runnable_ns + int(queued_s * 1e9),
        BEGIN.throttled_periods + periods,
        BEGIN.throttled_us + int(throttled_s * 1e6),
    )
    return host_cause(3, seconds, BEGIN, end)


def test_quiet_hosts_have_no_part_in_it() -> None:
    assert lost(5.0) is None
    assert lost(5.0, queued_s=0.05, periods=1, throttled_s=0.02) is None


def test_the_quota_is_named_with_its_share() -> None:
    cause = lost(5.0, periods=40, throttled_s=2.0)
    assert cause is not None
    assert (cause.cause, cause.rank) == ("cpu quota", 3)
    assert cause.share == pytest.approx(0.4)


def test_contention_is_told_from_the_quota() -> None:
    cause = lost(4.0, queued_s=3.0)
    assert cause is not None
    assert (cause.cause, cause.rank) == ("run queue", 3)
    assert cause.share == pytest.approx(0.75)


def test_the_queue_of_a_throttled_process_is_the_quotas_doing() -> None:
    cause = lost(5.0, queued_s=2.6, periods=45, throttled_s=2.5)
    assert cause is not None
    assert cause.cause == "cpu quota"


def test_the_share_is_capped() -> None:
    cause = lost(2.0, periods=20, throttled_s=6.0)
    assert cause is not None
    assert cause.share == 1.0


def test_counters_that_began_anew_are_no_loss() -> None:
    assert host_cause(3, 5.0, BEGIN, CpuCounters(0, 0, 0)) is None
