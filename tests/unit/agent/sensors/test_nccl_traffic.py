"""What NCCL's proxy has sent to whom, from link tables that are written here word by word."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.agent.sensors.test_links import COMM, KEY, LINK, OPEN, PID, name

from keepstep.agent.sensors.nccl_traffic import NcclTraffic
from keepstep.agent.sensors.network import NetworkSensors
from keepstep.core.summary import GroupInfo
from keepstep.ring.link_table import FEWEST, create

GROUPS = [GroupInfo("world", (0, 1, 2, 3))]


class Proxy:
    """A rank's link to rank 3, over which chunks of 1 MB have been sent."""

    def __init__(self) -> None:
        self.descriptor = create(FEWEST)
        self.path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        os.pwrite(self.descriptor, struct.pack("<Q", os.getpid()), PID)
        os.pwrite(self.descriptor, struct.pack("<Q", OPEN), COMM)
        name(self.path, rank=0, size=4)
        self._chunks = self._busy_ns = 0
        self.sends(0, 1.0)

    def sends(self, chunks: int, bytes_per_s: float) -> None:
        self._chunks += chunks
        self._busy_ns += round(chunks * 1e15 / bytes_per_s)
        steps = [self._chunks] * 5
        now_ns = time.monotonic_ns()
        words = [KEY, *steps, self._chunks * 10**6, self._busy_ns // 256, now_ns, now_ns, now_ns, now_ns]
        os.pwrite(self.descriptor, struct.pack("<12Q", *words), LINK)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    made = Proxy()
    yield made
    os.close(made.descriptor)


def test_bytes_and_busy_time_are_told_before_and_after_a_moment(proxy: Proxy) -> None:
    traffic = NcclTraffic({0: proxy.path, 1: "/dev/null"})
    times = 10.0, 20.0, 30.0, 40.0
    for now_s, rate in zip(times, (1e9, 1e9, 1e9, 1e8), strict=True):
        proxy.sends(100, rate)
        traffic.look(now_s, lambda rank: GROUPS)
    (one,) = traffic.traffic(30.0, "n0", 16)
    assert (one.node, one.source, one.target, one.over) == ("n0", "rank:0", "rank:3", "NCCL")
    assert (one.before_s, one.before_bytes, one.before_busy_s) == (
        20.0,
        2 * 10**8,
        pytest.approx(0.2, rel=1e-4),
    )
    assert (one.after_s, one.after_bytes, one.after_busy_s) == (10.0, 10**8, pytest.approx(1.0, rel=1e-4))


def test_looks_are_as_rare_as_they_are_dear(proxy: Proxy) -> None:
    traffic = NcclTraffic({0: proxy.path})
    seen: list[int] = []
    for turn in range(50):
        proxy.sends(1, 1e9)
        traffic.look(1.0 + turn / 100, lambda rank: seen.append(rank) or GROUPS)
    assert len(seen) == 1


def test_the_usual_rate_of_a_link_is_that_of_its_older_looks(proxy: Proxy, tmp_path: Path) -> None:
    sensors = NetworkSensors("n0", {0: proxy.path})
    for turn in range(40):
        proxy.sends(100, 1e9 if turn < 30 else 1e8)
        sensors.look(100.0 * turn + 1, {}, lambda rank: GROUPS, now=True)
    sensors.save(tmp_path)
    (link,) = json.loads((tmp_path / "rank-00000.json").read_text())["links"]
    assert link["usual"] == pytest.approx(1e9, rel=1e-4)


def test_a_new_process_begins_anew_and_a_group_that_is_not_known_has_no_path(proxy: Proxy) -> None:
    traffic = NcclTraffic({0: proxy.path})
    for now_s in (10.0, 20.0):
        proxy.sends(100, 1e9)
        traffic.look(now_s, lambda rank: [])
    assert traffic.traffic(0.0, "n0", 16) == ()
    again = Proxy()
    try:
        os.dup2(again.descriptor, proxy.descriptor)
        again.sends(5, 1e9)
        traffic.look(30.0, lambda rank: GROUPS)
        assert traffic.traffic(0.0, "n0", 16) == ()
    finally:
        os.close(again.descriptor)
