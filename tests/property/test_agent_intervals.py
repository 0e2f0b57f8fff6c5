"""Interval unions, stream sums and cutting against twins that do the same the slow and obvious way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many
from tests.unit.agent import agent_generator as g

from keepstep.agent.ranks.cut import Cut
from keepstep.agent.ranks.intervals import NOTHING, Union
from keepstep.agent.ranks.iterations import IterationCutter
from keepstep.agent.ranks.summarise import summarise

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def union(pairs: list[tuple[int, int]]) -> Union:
    return Union(np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64))


def points(pairs: list[tuple[int, int]]) -> set[int]:
    return {point for a, b in pairs for point in range(a, b)}


@given(intervals, intervals, st.lists(st.integers(-5, 70), min_size=1, max_size=5))
def test_unions_measure_as_counting_points_does(
    one: list[tuple[int, int]], other: list[tuple[int, int]], times: list[int]
) -> None:
    here, there = union(one), union(other)
    assert here.total_ns == len(points(one))
    assert here.joined(there).total_ns == len(points(one) | points(other))
    assert here.less(there) == len(points(one) - points(other))
    assert here.until(np.array(times)).tolist() == [len({p for p in points(one) if p < t}) for t in times]
    assert (here.starts[1:] > here.ends[:-1]).all()


record = st.fixed_dictionaries(
    {
        "start_ns": st.integers(0, 99),
        "length": st.integers(0, 40),
        "waits_after": st.one_of(st.none(), st.integers(1, 40)),
        "in_flight": st.booleans(),
        "group": st.integers(0, 1),
        "op": st.sampled_from([g.ALLREDUCE, g.SEND]),
        "peer": st.integers(-1, 1),
        "flags": st.sampled_from([0, g.SYNC_KNOWN, g.ASYNC, g.ASYNC | g.SYNC_KNOWN, g.END_BY_WAIT]),
        "size": st.integers(0, 1000),
    }
)


@settings(max_examples=many(200))
@given(st.lists(record, max_size=12))
def test_summaries_add_up_as_by_hand(records: list[dict]) -> None:
    end = 100
    records.sort(key=lambda one: one["start_ns"])
    table = np.zeros(len(records), g.RECORD)
    for place, one in enumerate(records):
        wait = one["start_ns"] + one["waits_after"] if one["waits_after"] else 0
        table[place] = np.zeros((), g.RECORD)
        for name, value in {
            "ticket": place, "start_ns": one["start_ns"], "wait_ns": wait, "bytes": one["size"], "seq": place + 1,
            "end_ns": 0 if one["in_flight"] else one["start_ns"] + one["length"] or 1,
            "group": one["group"], "op": one["op"], "peer": one["peer"], "flags": one["flags"], "kind": 1, "thread": 1,
        }.items():  # fmt: skip
            table[name][place] = value
    summary = summarise(Cut(0, 0, end, table, NOTHING), 3, {0: "a", 1: "b"})

    seen_groups = {int(r["group"]) for r in table if r["flags"] == 9 and r["wait_ns"]}
    waiting: set[int] = set()
    for r in table:
        until = int(r["end_ns"]) or end
        if r["wait_ns"]:
            begin = int(r["wait_ns"])
        elif r["flags"] & g.END_BY_WAIT or (r["flags"] == 9 and int(r["group"]) in seen_groups):
            continue
        else:
            begin = int(r["start_ns"])
        waiting |= set(range(begin, min(until, end)))
    assert round(summary.blocked_s * 1e9) == len(waiting)
    assert round((summary.self_s + summary.blocked_s) * 1e9) == end

    keys = {(int(r["group"]), int(r["op"]), int(r["peer"])) for r in table}
    assert {({"a": 0, "b": 1}[s.group], s.op, s.peer) for s in summary.streams} == keys
    for stream in summary.streams:
        mine = [
            r
            for r in table
            if ({0: "a", 1: "b"}[int(r["group"])], int(r["op"]), int(r["peer"]))
            == (stream.group, stream.op, stream.peer)
        ]
        lengths = [(int(r["end_ns"]) or end) - int(r["start_ns"]) for r in mine]
        assert stream.count == len(mine)
        assert stream.bytes == sum(int(r["bytes"]) for r in mine)
        assert stream.first_seq == min(int(r["seq"]) for r in mine)
        assert round(stream.busy_s * 1e9) == sum(lengths)
        assert round(stream.fastest_s * 1e9) == min(lengths)
        assert stream.start_s * 1e9 == pytest.approx(sum(int(r["start_ns"]) for r in mine) / len(mine))
        assert -1e-12 <= stream.blocked_s <= stream.busy_s + 1e-12


PROGRAMS = {
    "ddp": (2, g.ddp(15, evaluate_every=4, checkpoint_every=6)),
    "unmarked": (2, g.ddp(15, evaluate_every=5, marked=False)),
    "two": (2, g.ddp(15, optimizers=2)),
    "gan": (2, g.gan(30)),
    "pipeline": (4, g.pipeline(15, stages=4)),
}


@settings(max_examples=many(40), deadline=None)
@given(
    st.sampled_from(sorted(PROGRAMS)),
    st.lists(st.integers(1, 700), min_size=1, max_size=8),
    st.integers(0, 3),
)
def test_how_often_the_ring_is_polled_does_not_change_what_is_cut(
    name: str, gaps_ms: list[int], number: int
) -> None:
    world, program = PROGRAMS[name]
    job = g.Job(world, jitter=0.05, seed=number).play(program)
    rows = job.ranks[number % world].table()
    expected = [_facts(cut) for cut in _cut(rows, [5])]
    assert [_facts(cut) for cut in _cut(rows, gaps_ms)] == expected


def _facts(cut: Cut) -> tuple[int, int, int, int]:
    return cut.step, cut.start_ns, cut.end_ns, cut.duration_ns


def _cut(rows: np.ndarray, gaps_ms: list[int]) -> list[Cut]:
    cutter, cuts = IterationCutter(), []
    before, turn = int(rows["start_ns"].min()) - 1, 0
    last = int(max(rows["start_ns"].max(), rows["end_ns"].max())) + 100 * g.MS
    while before < last:
        now = before + gaps_ms[turn % len(gaps_ms)] * g.MS
        turn += 1
        begun = rows[(rows["start_ns"] > before) & (rows["start_ns"] <= now)].copy()
        begun["end_ns"][begun["end_ns"] > now] = 0
        ended = rows[(rows["end_ns"] > before) & (rows["end_ns"] <= now)].copy()
        cuts.extend(cutter.feed(begun, ended, 0, now))
        before = now
    return cuts
