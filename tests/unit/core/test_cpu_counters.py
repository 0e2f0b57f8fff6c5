"""Throttling is read where the kernel counts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from keepstep.core.cpu_counters import cpu_counters, quota_file


@pytest.mark.parametrize(
    ("mounts", "group", "folder", "stat", "expected"),
    [
        (
            "30 24 0:26 / {top}/unified rw - cgroup2 cgroup2 rw",
            "0::/job/worker",
            "unified/job",
            "usage_usec 9\nnr_periods 50\nnr_throttled 20\nthrottled_usec 123\n",
            (222, 20, 123),
        ),
        (
            "31 24 0:27 / {top}/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct",
            "4:cpu,cpuacct:/job/worker",
            "cpu,cpuacct/job/worker",
            "nr_periods 50\nnr_throttled 20\nthrottled_time 123000\n",
            (222, 20, 123),
        ),
    ],
)
def test_throttling_is_read_from_both_cgroup_versions(
    tmp_path: Path, mounts: str, group: str, folder: str, stat: str, expected: tuple[int, int, int]
) -> None:
    (tmp_path / "mountinfo").write_text(mounts.format(top=tmp_path) + "\n")
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "cgroup").write_text(group + "\n")
    (tmp_path / "9" / "schedstat").write_text("111 222 3\n")
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "cpu.stat").write_text(stat)
    found = quota_file(9, tmp_path, tmp_path / "mountinfo")
    assert found == tmp_path / folder / "cpu.stat"
    counters = cpu_counters(9, found, tmp_path)
    assert counters is not None
    assert (counters.runnable_ns, counters.throttled_periods, counters.throttled_us) == expected


def test_a_worker_without_quota_or_gone_has_none(tmp_path: Path) -> None:
    assert quota_file(9, tmp_path, tmp_path / "mountinfo") is None
    assert cpu_counters(9, None, tmp_path) is None
