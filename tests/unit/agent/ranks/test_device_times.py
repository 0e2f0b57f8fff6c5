"""Iterations of a rank as its GPU had them, under a host that is ahead of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tests.unit.agent import agent_generator as g

from keepstep.agent.ranks.event_buffer import Rows
from keepstep.agent.ranks.track import RankTrack
from keepstep.core.events import Device, Flag, Kind, Op, Phase
from keepstep.core.finding import Finding
from keepstep.core.summary import GroupInfo, IterationSummary

GROUPS = [
    GroupInfo("0", (0, 1), "cuda:nccl"),
    GroupInfo("nccl-1", (0, 1), "nccl", "rank 0 of 2"),
]
HOST_MS = 20  # in which the host calls what an iteration does


def record(**fields: int) -> Rows:
    row = np.zeros(1, g.RECORD)
    row["group"], row["peer"] = -1, -1
    for name, value in fields.items():
        row[name] = value
    return row


class Job:
    """A rank on a host that calls an iteration each 20 ms, and on a GPU that takes as long as it is told."""

    def __init__(self) -> None:
        self.track = RankTrack(0, "here", (0, 1))
        self.findings: list[Finding] = []
        self.logged: list[IterationSummary] = []
        self._ticket = 0
        self._on_gpu: list[tuple[int, Rows]] = []  # when it will be over, and its record
        self._step = 0
        self._host_ns = 1_000 * g.MS
        self._gpu_ns = self._host_ns

    def step(
        self,
        own_ms: float,
        blocked_ms: float,
        *,
        pause: bool = False,
        measured: Device | None = Device.ITERATION,
    ) -> None:
        self._step += 1
        begin, end = self._host_ns, self._host_ns + HOST_MS * g.MS
        phases = [(Phase.BACKWARD, begin + 1 * g.MS, end - 5 * g.MS), (Phase.OPTIMIZER, end - 4 * g.MS, end)]
        if pause:
            phases.insert(0, (Phase.CHECKPOINT, begin, begin + 1 * g.MS))
        rows: list[Rows] = []
        for code, start_ns, end_ns in phases:
            self._ticket += 1
            fields = {"ticket": self._ticket, "seq": self._step, "kind": int(Kind.PHASE), "op": int(code)}
            rows.append(record(**fields, start_ns=start_ns, end_ns=end_ns))
        host = np.concatenate(rows).astype(g.RECORD)
        took = int((own_ms + blocked_ms) * g.MS)
        begun, self._gpu_ns = self._gpu_ns, max(self._gpu_ns + took, end)
        gpu: list[Rows] = []
        timed = {"flags": int(Flag.ENQUEUED | Flag.TIMED)}
        if measured is not None:
            blocked = int(blocked_ms * g.MS)
            call = {"kind": int(Kind.COLLECTIVE), "op": int(Op.ALLREDUCE), "group": 1, "bytes": 64, **timed}
            gpu.append(
                record(**call, start_ns=begin + 5 * g.MS, wait_ns=self._gpu_ns - blocked, end_ns=self._gpu_ns)
            )
            what = {
                "kind": int(Kind.DEVICE),
                "op": int(measured),
                "peer": self._step,
                "bytes": blocked,
                **timed,
            }
            gpu.append(record(**what, start_ns=begin, wait_ns=begun, end_ns=self._gpu_ns))
        self._on_gpu += [(self._gpu_ns, row) for row in gpu]
        self._host_ns = end
        self._take(host, end + 1 * g.MS)

    def settle(self) -> None:
        """Until the GPU has done all of its work."""
        for now_ns in range(self._host_ns, max(self._gpu_ns, self._host_ns) + 100 * g.MS, 50 * g.MS):
            self._take(np.zeros(0, g.RECORD), now_ns)

    def _take(self, host: Rows, now_ns: int) -> None:
        over = [row for end_ns, row in self._on_gpu if end_ns <= now_ns]
        self._on_gpu = self._on_gpu[len(over) :]
        measured = np.concatenate(over).astype(g.RECORD) if over else None
        taken = self.track.take(host, host, 0, now_ns, lambda: GROUPS, measured)
        self.findings += taken.findings
        self.logged += [one for one, _ in taken.iterations]


def history(job: Job) -> Sequence[IterationSummary]:
    job.settle()
    return job.track.iterations(0, 10_000)


def test_the_gpu_is_the_measure() -> None:
    job = Job()
    for _ in range(20):
        job.step(own_ms=40, blocked_ms=10)
    last = history(job)[-1]
    assert (last.duration_s, last.self_s, last.blocked_s) == pytest.approx((0.05, 0.04, 0.01))
    assert last.ahead_s > 0.2  # the host is far ahead
    (stream,) = last.streams
    assert (stream.group, stream.op, stream.peer, stream.count) == ("nccl-1", Op.ALLREDUCE, -1, 1)
    assert (stream.fastest_s, stream.start_s) == pytest.approx((0.01, 0.04))
    assert not job.findings


@pytest.mark.parametrize("factor", [1.3, 2])
def test_a_slow_gpu_is_found_though_the_host_is_as_fast_as_before(factor: float) -> None:
    job = Job()
    for _ in range(40):
        job.step(own_ms=40, blocked_ms=10)
    job.settle()
    steps = 0
    while not job.findings:
        job.step(own_ms=40 * factor, blocked_ms=10)
        job.settle()
        steps += 1
        assert steps <= 4
    (found,) = job.findings
    assert (found.kind, found.onset_step) == ("slow", 40)


def test_a_gpu_that_waits_for_its_host_is_told_by_the_hosts_phases() -> None:
    job = Job()
    for _ in range(20):
        job.step(own_ms=10, blocked_ms=0)
    last = history(job)[-1]
    assert last.ahead_s == 0
    assert last.backward_s == pytest.approx(0.014)


def test_pauses_and_graphs_are_no_measure() -> None:
    job = Job()
    for _ in range(10):
        job.step(own_ms=40, blocked_ms=10)
    before = len(history(job))
    job.step(own_ms=400, blocked_ms=0, pause=True)
    job.step(own_ms=400, blocked_ms=0, measured=Device.BLIND)
    assert len(history(job)) == before
    assert job.track.device.blind == 1
    assert len(job.logged) == 12  # they are logged as the host had them
    assert job.logged[-1].ahead_s < 0


def test_without_measures_the_host_counts_again() -> None:
    job = Job()
    for _ in range(10):
        job.step(own_ms=40, blocked_ms=10)
    for _ in range(2400):
        job.step(own_ms=10, blocked_ms=0, measured=None)
    assert history(job)[-1].ahead_s < 0
    assert len(job.logged) + len(job.track.rest()) == 2410
    assert not job.findings


def test_records_that_make_no_sense_are_left_out() -> None:
    job = Job()
    for _ in range(10):
        job.step(own_ms=-30, blocked_ms=40)  # blocked for longer than it lasted
    assert not job.track.device.active
    assert all(one.ahead_s < 0 for one in history(job))


def test_a_host_may_be_far_ahead() -> None:
    job = Job()
    for _ in range(200):
        job.step(own_ms=80, blocked_ms=20)
    rows = history(job)
    assert rows[-1].ahead_s == pytest.approx(16, abs=1)
    assert [row.step for row in rows] == list(range(rows[0].step, 200))
    assert len(rows) > 150
    assert all(row.duration_s == pytest.approx(0.1) for row in rows)


def test_where_few_are_measured_earlier_ones_take_the_place_of_those_missing() -> None:
    job = Job()
    for number in range(300):
        job.step(own_ms=40, blocked_ms=10, measured=Device.ITERATION if number % 64 < 8 else None)
    job.settle()
    measured = [one.step for one in job.track.iterations(0, 10_000)]
    assert [step for step in measured if step < 256][-16:] == [*range(128, 136), *range(192, 200)]
    found = [one.step for one in job.track.iterations(240, 10_000, 256)]
    assert found == [step for step in measured if step >= 256 or step in (*range(128, 136), *range(192, 200))]
    assert [one.step for one in job.track.iterations(240, 10_000)] == [
        step for step in measured if step >= 256
    ]
