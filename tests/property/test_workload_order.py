"""In a simulated job nobody starts an operation before its inputs ended, and everything has its counterpart."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from benchmarks.simulate import SCHEDULES, Fault, Workload
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.effort import many

from keepstep.core.events import Kind, Op, Phase
from keepstep.core.layout import ParallelLayout

SLACK_NS = 2  # times are rounded


@st.composite
def workloads(draw):
    layout = ParallelLayout(
        tp=draw(st.sampled_from([1, 2, 4])), pp=draw(st.integers(1, 5)), dp=draw(st.integers(1, 3))
    )
    schedule = draw(st.sampled_from(SCHEDULES))
    assume(schedule != "interleaved" or layout.pp > 1)
    batches = layout.pp * draw(st.integers(1, 3)) if schedule == "interleaved" else draw(st.integers(1, 7))
    # one node: all times are on one clock
    return Workload(
        layout, schedule, batches, draw(st.integers(1, 3)), ranks_per_node=64, seed=draw(st.integers(0, 99))
    )


@st.composite
def faults(draw, workload):
    ranks = st.integers(0, workload.layout.world_size - 1)
    return [
        Fault(
            draw(st.sampled_from(["forward", "backward", "data", "optimizer", "compute", "tp", "dp"])),
            draw(ranks), micro_batch=draw(st.integers(-1, workload.micro_batches - 1)),
            delay_s=draw(st.floats(0, 5)), factor=draw(st.floats(1, 3)),
        )
        for _ in range(draw(st.integers(0, 2)))
    ]  # fmt: skip


@settings(max_examples=many(60), deadline=None)
@given(st.data())
def test_causes_come_before_effects(data):
    workload = data.draw(workloads())
    run = workload.run(2, data.draw(faults(workload)), log=True)
    collectives, messages = defaultdict(list), defaultdict(dict)
    for rank in range(workload.layout.world_size):
        rows = run.records(rank)
        names = list(workload.group_names(rank).values())
        own_thread(rows)
        for row in rows:
            if row["kind"] == Kind.COLLECTIVE:
                collectives[names[row["group"]], row["seq"]].append(row)
            elif row["kind"] == Kind.P2P:
                source, target = (rank, row["peer"]) if row["op"] == Op.SEND else (row["peer"], rank)
                messages[names[row["group"]], source, target, row["seq"]][int(row["op"])] = row
    groups = workload.groups()
    for (name, _), rows in collectives.items():
        assert len(rows) == len(groups[name].members)
        assert len({int(row["bytes"]) for row in rows}) == 1
        assert min(row["end_ns"] for row in rows) >= max(row["start_ns"] for row in rows) - SLACK_NS
    for both in messages.values():
        assert set(both) == {Op.SEND, Op.RECV}
        assert both[Op.RECV]["end_ns"] >= both[Op.SEND]["start_ns"] - SLACK_NS


def own_thread(rows: np.ndarray) -> None:
    """Records of one rank: in order, blocks and collectives one after the other, phases in one another at most."""
    assert (np.diff(rows["start_ns"]) >= -SLACK_NS).all()
    assert (rows["end_ns"] >= rows["start_ns"]).all()
    waits = rows[rows["kind"] != Kind.PHASE]
    begin = np.where(waits["wait_ns"] > 0, waits["wait_ns"], waits["start_ns"])
    order = np.lexsort((waits["end_ns"], begin))
    assert (begin[order][1:] >= waits["end_ns"][order][:-1] - SLACK_NS).all()
    phases = rows[rows["kind"] == Kind.PHASE]
    assert (phases["start_ns"][1:] >= phases["end_ns"][:-1] - SLACK_NS).all()
    forward, backward = (int((phases["op"] == code).sum()) for code in (Phase.MODEL, Phase.BACKWARD))
    assert forward > 0
    assert backward in (forward, 2 * forward)


@settings(max_examples=many(30), deadline=None)
@given(st.data())
def test_no_fault_makes_a_step_shorter(data):
    workload = data.draw(workloads())
    hit = workload.run(2, data.draw(faults(workload)))
    assert (hit.iteration_s >= workload.run(2).iteration_s - 1e-9).all()
