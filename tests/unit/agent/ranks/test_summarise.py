"""Sums per stream, and self time: it grows for the slow rank and for nobody else."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest
from tests.unit.agent import agent_generator as g

from keepstep.agent.ranks.cut import Cut
from keepstep.agent.ranks.intervals import NOTHING
from keepstep.agent.ranks.iterations import IterationCutter
from keepstep.agent.ranks.summarise import summarise
from keepstep.core.summary import IterationSummary

NAMES = {g.WORLD: "world", g.TP: "tp", g.PP: "pp", g.DP: "dp"}
LOOPS = {
    "ddp": (3, g.ddp(40), True),
    "ddp, waits not seen": (3, g.ddp(40, waits_seen=False), False),
    "ddp with accumulation": (3, g.ddp(40, accumulate=3), True),
    "fsdp2, waits not seen": (3, g.fsdp2(40), False),
    "1F1B": (4, g.pipeline(40, stages=4), True),
    "tp2 pp2 dp2": (8, g.pipeline(40, stages=2, tensor=2, data=2), True),
}


def summaries(rank: g.Rank) -> list[IterationSummary]:
    cutter = IterationCutter()
    cuts: list[Cut] = []
    for started, finished, now in g.polls(rank.table()):
        cuts.extend(cutter.feed(started, finished, 0, now))
    return [summarise(cut, rank.number, NAMES) for cut in cuts]


def self_time(found: list[IterationSummary], first: int, last: int) -> float:
    return mean(one.self_s for one in found if first <= one.step < last)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_only_the_slow_rank_needs_more_time_for_itself(loop: str, factor: float) -> None:
    world, program, exact = LOOPS[loop]
    job = g.Job(world, jitter=0.02)
    slow = 1
    job.ranks[slow].slow = lambda step: factor if step >= 20 else 1.0
    job.play(program)
    for rank in job.ranks:
        found = summaries(rank)
        before, after = self_time(found, 8, 18), self_time(found, 24, 36)
        if rank.number == slow:
            assert after / before == pytest.approx(factor, rel=0.1)
        else:
            assert after <= before * 1.02
        if exact:
            assert before == pytest.approx(mean(rank.worked[8:18]), rel=0.01)
            assert after == pytest.approx(mean(rank.worked[24:36]), rel=0.01)
        assert all(one.self_s + one.blocked_s == pytest.approx(one.duration_s) for one in found)


def test_phases_hold_the_ranks_own_time_and_no_waits() -> None:
    job = g.Job(2)
    job.ranks[0].slow = lambda step: 2.0
    job.play(g.ddp(20, data_ms=10))
    one = summaries(job.ranks[1])[12]
    assert one.data_s == pytest.approx(0.010, rel=0.01)
    assert one.backward_s == pytest.approx(0.060, rel=0.01)
    assert one.optimizer_s == pytest.approx(0.005, rel=0.01)
    assert one.blocked_s == pytest.approx(one.duration_s - 0.105, rel=0.01)


def test_streams_are_summed_per_group_operation_and_peer() -> None:
    job = g.Job(4).play(g.pipeline(20, stages=4, micro_batches=8))
    one = summaries(job.ranks[1])[10]
    assert [(s.group, s.op, s.peer, s.count, s.bytes) for s in one.streams] == [
        ("pp", g.SEND, 0, 8, 8 * 4096),
        ("pp", g.SEND, 2, 8, 8 * 4096),
        ("pp", g.RECV, 0, 8, 8 * 4096),
        ("pp", g.RECV, 2, 8, 8 * 4096),
    ]
    assert {s.first_seq for s in one.streams} == {81}
    for stream in one.streams:
        assert 0 <= stream.start_s <= stream.end_s <= one.duration_s
        assert 0 <= stream.blocked_s <= stream.busy_s
        assert stream.fastest_s * stream.count <= stream.busy_s + 1e-9
    # Ours is what the pipeline waits for: nobody is waited for in sends.
    assert sum(s.blocked_s for s in one.streams if s.op == g.RECV) == pytest.approx(one.blocked_s, rel=0.3)


def test_times_are_told_as_if_pauses_came_first() -> None:
    rank = g.Job(2).play(g.ddp(12, evaluate_every=10)).ranks[0]
    found = summaries(rank)
    usual, paused = found[9], found[10]
    assert paused.evaluation_s == pytest.approx(0.302, abs=0.001)
    assert paused.start_s - (usual.start_s + usual.duration_s) == pytest.approx(paused.evaluation_s)
    assert found[11].start_s == pytest.approx(paused.start_s + paused.duration_s)
    for with_pause, without in zip(paused.streams, usual.streams, strict=True):
        assert with_pause.start_s == pytest.approx(without.start_s, abs=1e-4)
        assert with_pause.end_s == pytest.approx(without.end_s, abs=1e-4)


def _cut(rows: list[dict[str, int]], end_ms: int) -> Cut:
    table = np.zeros(len(rows), g.RECORD)
    for place, row in enumerate(rows):
        for name, value in {"kind": g.COLLECTIVE, "op": g.ALLREDUCE, "thread": 1, **row}.items():
            table[name][place] = value * (g.MS if name.endswith("_ns") else 1)
    return Cut(0, 0, end_ms * g.MS, table, NOTHING)


@pytest.mark.parametrize(
    ("why", "rows", "waited_ms"),
    [
        ("a call that waits", [{"start_ns": 10, "end_ns": 30, "flags": g.SYNC_KNOWN}], 20),
        ("its wait was seen", [{"start_ns": 10, "end_ns": 30, "wait_ns": 25, "flags": g.ASYNC}], 5),
        ("waited for when it was over", [{"start_ns": 10, "end_ns": 30, "wait_ns": 40, "flags": g.ASYNC}], 0),
        ("still in flight", [{"start_ns": 80, "end_ns": 0, "flags": g.ASYNC}], 20),
        ("sent, not waited for yet", [{"start_ns": 80, "end_ns": 0, "flags": g.ASYNC | g.END_BY_WAIT}], 0),
        ("known to be asynchronous, no wait seen", [{"start_ns": 10, "end_ns": 30, "flags": 9}], 20),
        (
            "the same, and its neighbour's wait was seen",
            [
                {"start_ns": 10, "end_ns": 30, "flags": 9},
                {"start_ns": 20, "end_ns": 60, "wait_ns": 50, "flags": 9},
            ],
            10,
        ),
        (
            "two at once count once",
            [
                {"start_ns": 10, "end_ns": 30, "flags": g.ASYNC},
                {"start_ns": 20, "end_ns": 50, "flags": g.ASYNC},
            ],
            40,
        ),
        ("begun before the iteration", [{"start_ns": -20, "end_ns": 10, "flags": g.ASYNC}], 10),
    ],
)
def test_when_a_rank_waits(why: str, rows: list[dict[str, int]], waited_ms: int) -> None:
    one = summarise(_cut(rows, 100), 0, {0: "dp"})
    assert one.blocked_s * 1e3 == pytest.approx(waited_ms), why


def test_what_the_thread_began_meanwhile_is_not_counted_as_blocked_in_the_stream() -> None:
    rows = [
        {"start_ns": 10, "end_ns": 30, "flags": g.ASYNC},
        {"start_ns": 20, "end_ns": 50, "flags": g.ASYNC},
    ]
    one = summarise(_cut(rows, 100), 0, {0: "dp"})
    assert one.streams[0].busy_s * 1e3 == pytest.approx(50)
    assert one.streams[0].blocked_s * 1e3 == pytest.approx(10 + 30)
