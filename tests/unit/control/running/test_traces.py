"""Traces that an operator orders: who may be traced, what is said of the files, and what is not told meanwhile."""

from __future__ import annotations

import pytest
from tests.unit.control.running.operators_stage import Office

from keepstep.wire import RankTrace, RankTraces, Traced, TraceRanks, TraceSteps


def order(*ranks: int, steps: int = 5, within_s: float = 60.0, dry: bool = False) -> TraceSteps:
    return TraceSteps(ranks, steps, within_s, dry)


def written(rank: int) -> RankTrace:
    return RankTrace(rank, "written", 43, f"traces/rank-{rank:05d}-step-43.json.gz", 1000)


def test_the_files_are_told_once_all_are_written() -> None:
    office = Office()
    office.order(order(0, 2))
    asked = office.sent(TraceRanks)
    assert sorted(one.ranks for one in asked) == [(0,), (2,)]
    (number,) = {one.number for one in asked}
    office.tell(0, RankTraces(number, 0, (RankTrace(0, "tracing", 43),)))
    office.tell(0, RankTraces(number, 0, (written(0),)))
    assert not office.sent(Traced)
    office.tell(
        2, RankTraces(number, 2, (RankTrace(2, "failed", why="the script uses torch's profiler itself"),))
    )
    answer = office.answer(Traced)
    assert [(one.rank, one.node, one.step, one.why) for one in answer.files] == [
        (0, "gpu-0", 43, ""),
        (2, "gpu-2", -1, "the script uses torch's profiler itself"),
    ]
    office.order(order(1))
    assert office.sent(TraceRanks)


def test_an_order_is_repeated_to_who_has_not_answered() -> None:
    office = Office()
    office.order(order(0, 1))
    (number,) = {one.number for one in office.sent(TraceRanks)}
    office.tell(0, RankTraces(number, 0, (RankTrace(0),)))
    office.run("wait 1.2")
    assert [one.ranks for one in office.sent(TraceRanks)] == [(1,)]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (order(7), "there is no rank 7; the job has 0-2"),
        (order(), "give the ranks that are to be traced"),
        (order((1 << 20) - 1), "there is no rank 1048575; the job has 0-2"),
    ],
)
def test_what_cannot_be_traced_is_refused_in_a_line(message: TraceSteps, why: str) -> None:
    office = Office()
    office.order(message)
    assert office.answer(Traced).refused == why


def test_two_at_once_a_silent_agent_and_a_dry_run() -> None:
    office = Office()
    office.order(order(0, dry=True))
    assert office.answer(Traced).done.startswith("would trace 5 steps of ranks 0")
    office.run("lose node=1 role=agent")
    office.order(order(1))
    assert office.answer(Traced).refused == "no agent answers for rank 1, on gpu-1"
    office.order(order(0))
    office.order(order(2))
    assert office.answer(Traced).refused == "ranks 0 are being traced already"


def test_a_job_that_has_made_no_step_is_not_traced() -> None:
    office = Office(step=-1)
    office.order(order(0))
    assert office.answer(Traced).refused == "the job has not done its first steps"


def test_a_rank_that_dies_meanwhile_is_told() -> None:
    office = Office("cluster nodes=3 ranks=1")
    office.order(order(0, 1))
    (number,) = {one.number for one in office.sent(TraceRanks)}
    office.tell(0, RankTraces(number, 0, (written(0),)))
    office.run("found kind=crash rank=1 step=44 code=137 message=killed")
    office.run("ended node=1 code=137 message=killed")
    office.run("wait 0.2")
    answer = office.answer(Traced)
    assert [bool(one.why) for one in answer.files] == [False, True]
    assert answer.files[1].why == "it did not end: the job is ending"


def test_an_agent_that_is_started_again_ends_the_wait() -> None:
    office = Office()
    office.order(order(1))
    office.run("lose node=1 role=agent")
    office.run("agent node=1 pid=999")
    office.run("wait 0.2")
    (file,) = office.answer(Traced).files
    assert file.why == "it did not end: the agent of rank 1 was started again"


def test_the_operator_is_answered_when_his_time_is_over_and_the_files_are_told_later() -> None:
    office = Office()
    office.order(order(1, within_s=2.0))
    (number,) = {one.number for one in office.sent(TraceRanks)}
    office.tell(1, RankTraces(number, 1, (RankTrace(1, "tracing", 43),)))
    office.run("wait 2.2")
    assert office.answer(Traced).refused.startswith("not done in time: the trace of ranks 1 goes on")
    office.tell(1, RankTraces(number, 1, (written(1),)))
    assert office.told() == ["traces are written: traces/rank-00001-step-43.json.gz"]
    assert not office.sent(Traced)


def test_slowness_meanwhile_is_told_only_if_it_lasts() -> None:
    office = Office()
    office.order(order(1))
    (number,) = {one.number for one in office.sent(TraceRanks)}
    office.run("found kind=slow rank=0-2 step=42 onset=41 before=0.5 after=1.0")
    office.tell(1, RankTraces(number, 1, (written(1),)))
    office.run("found kind=relief rank=0-2 step=46 onset=45 before=1.0 after=0.5")
    office.go_on(10, step=46)
    assert office.asked is None
    office.order(order(1))
    number = max(one.number for one in office.sent(TraceRanks))
    office.run("found kind=slow rank=0-2 step=62 onset=61 before=0.5 after=1.0")
    office.tell(1, RankTraces(number, 1, (written(1),)))
    assert office.asked is None
    office.go_on(5, step=66)
    office.run("profiles rank=2 onset=61")
    assert len(office.controller.cases.incidents) == 1


def test_what_another_node_says_of_a_rank_is_ignored() -> None:
    office = Office()
    office.order(order(0))
    (number,) = {one.number for one in office.sent(TraceRanks)}
    office.tell(1, RankTraces(number, 1, (written(0),)))
    office.tell(0, RankTraces(number + 1, 0, (written(0),)))
    assert not office.sent(Traced)
