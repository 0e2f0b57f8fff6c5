from __future__ import annotations

import pytest

from keepstep.detect import HostSample, host_cause


def test_quiet_hosts_have_no_part_in_it() -> None:
    assert host_cause([]) is None
    assert host_cause([HostSample(rank, 5.0, 50, 1, 20_000, 50_000_000) for rank in range(4)]) is None


def test_the_quota_is_named_with_its_share() -> None:
    cause = host_cause(
        [HostSample(0, 5.0), HostSample(3, 5.0, periods=50, throttled_periods=40, throttled_us=2_000_000)]
    )
    assert cause is not None
    assert (cause.kind, cause.rank, cause.ranks) == ("cpu-quota", 3, (3,))
    assert cause.share == pytest.approx(0.4)
    assert str(cause) == "CPU quota throttled: rank 3 lost 40% of its time"


def test_contention_is_told_from_the_quota() -> None:
    cause = host_cause([HostSample(rank, 4.0, queue_wait_ns=(1 + rank) * 10**9) for rank in range(3)])
    assert cause is not None
    assert (cause.kind, cause.rank, cause.ranks) == ("run-queue", 2, (0, 1, 2))
    assert cause.share == pytest.approx(0.75)


def test_the_queue_of_a_throttled_process_is_the_quotas_doing() -> None:
    cause = host_cause([HostSample(1, 5.0, 50, 45, 2_500_000, queue_wait_ns=2_600_000_000)])
    assert cause is not None
    assert cause.kind == "cpu-quota"


def test_samples_of_a_rank_are_added_and_the_share_is_capped() -> None:
    cause = host_cause([HostSample(1, 1.0, 10, 10, 3_000_000), HostSample(1, 1.0, 10, 10, 3_000_000)])
    assert cause is not None
    assert cause.share == 1.0


@pytest.mark.parametrize("sample", [HostSample(0, 0.0), HostSample(0, 1.0, queue_wait_ns=-1)])
def test_samples_that_make_no_sense_are_refused(sample: HostSample) -> None:
    with pytest.raises(ValueError, match="rank 0"):
        host_cause([sample])
