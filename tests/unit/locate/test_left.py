"""Ranks that ended with exit code 0, and what their peers were in."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from keepstep.core.events import Op, Phase
from keepstep.core.evidence import Evidence
from keepstep.core.finding import Finding
from keepstep.core.incident import Diagnosis
from keepstep.core.summary import DeviceCalls, GroupInfo, OpInFlight, RankState, StreamProgress
from keepstep.locate import locate_crash, locate_hang

LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41234"
LOOP, BARRIER = "train.py:10 main", "train.py:15 main"


def left(rank: int, step: int = 50) -> Finding:
    return Finding("exit", rank, "n0", 100.0, step)


def died(rank: int) -> Finding:
    return Finding("crash", rank, "n0", 101.0, 50, exit_code=1, message=LOST)


def waits(rank: int, seq: int, *, op: Op = Op.ALLREDUCE, site: str = LOOP, repeats: bool = True) -> RankState:
    flight = OpInFlight("0", int(op), -1, seq, 100.0, site, True, repeats=repeats)
    streams = (StreamProgress("0", int(op), -1, seq, seq - 1),)
    return RankState(rank, True, 49, int(Phase.BACKWARD), 99.0, 100, 100.0, 120.0, (flight,), streams, "S")


def gone(rank: int, made: int, step: int = 49) -> RankState:
    streams = (StreamProgress("0", int(Op.ALLREDUCE), -1, made, made),)
    return RankState(rank, False, step, int(Phase.FORWARD), 99.0, 100, 99.0, 120.0, (), streams, "")


def given(states: list[RankState], *findings: Finding) -> Evidence:
    world = max(state.rank for state in states) + 1
    members = tuple(range(world))
    return Evidence(
        {"0": GroupInfo("0", members)}, dict.fromkeys(members, "n0"), states=states, findings=findings
    )


def failed(state: RankState) -> RankState:
    """The rank, dead of its lost connection."""
    flights = tuple(replace(one, failed_s=100.1) for one in state.in_flight)
    streams = tuple(replace(one, completed=one.started) for one in state.streams)
    dead = replace(state, alive=False, process_state="", in_flight=(), failed=flights, streams=streams)
    return replace(dead, last_progress_s=100.1)


@pytest.mark.parametrize("ends", ["hang", "crash"])
def test_a_rank_that_leaves_while_others_wait_for_it_is_the_culprit(ends: str) -> None:
    others = [waits(0, 51), waits(2, 51)]
    if ends == "hang":
        found = locate_hang(given([others[0], gone(1, 50), others[1]], left(1)))
    else:
        dead = [failed(one) for one in others]
        found = locate_crash(given([dead[0], gone(1, 50), dead[1]], left(1), died(0), died(2)))
    (culprit,) = found.culprits
    assert (found.kind, culprit.rank, culprit.confidence) == (ends, 1, "high")
    assert culprit.cause == "left with exit code 0"
    assert culprit.detail == "at step 50 while ranks 0,2 were in ALLREDUCE at train.py:10 main"
    assert found.victims == (0, 2)
    assert found.summary == "rank 1 left with exit code 0"


@pytest.mark.parametrize("ends", ["hang", "crash"])
def test_a_rank_that_makes_one_more_call_than_all_that_left_is_the_culprit(ends: str) -> None:
    odd = waits(0, 82, op=Op.BARRIER, site=BARRIER, repeats=False)
    if ends == "hang":
        found = locate_hang(given([odd, gone(1, 81), gone(2, 81)], left(1), left(2)))
    else:
        found = locate_crash(given([failed(odd), gone(1, 81), gone(2, 81)], left(1), left(2), died(0)))
    (culprit,) = found.culprits
    assert (found.kind, culprit.rank, culprit.confidence) == (ends, 0, "high")
    assert culprit.cause == "made one operation more than the others"
    assert "in BARRIER at train.py:15 main, which nobody else makes" in culprit.detail
    assert "ranks 1-2 have left with exit code 0" in culprit.detail
    assert found.victims == ()
    assert found.summary == "rank 0 made one operation more than the others"


def test_of_one_against_one_it_is_not_known_who_is_meant() -> None:
    found = locate_hang(given([waits(0, 82, op=Op.BARRIER, repeats=False), gone(1, 81)], left(1)))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(0, "low")]
    assert "which is meant" in found.missing[0]


def test_who_left_in_the_middle_of_the_loop_is_to_blame_however_few_stay() -> None:
    found = locate_hang(given([waits(0, 51), gone(1, 50), gone(2, 50)], left(1), left(2)))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, "high"), (2, "high")]
    assert found.victims == (0,)


def test_of_several_that_left_the_first_is_to_blame() -> None:
    states = [waits(0, 51), gone(1, 40, 39), gone(2, 50)]
    found = locate_hang(given(states, left(1, 40), left(2)))
    assert [c.rank for c in found.culprits] == [1]
    assert "at step 40" in found.culprits[0].detail


def test_nobody_is_to_blame_while_the_others_work_for_themselves() -> None:
    exports = replace(waits(0, 51), in_flight=())
    found = locate_hang(given([exports, gone(1, 51), gone(2, 51)], left(1), left(2)))
    assert not found.culprits


def test_a_send_on_its_way_is_no_wait() -> None:
    flight = OpInFlight("0", int(Op.SEND), 1, 5, 100.0)
    works = replace(waits(0, 51), in_flight=(flight,), last_progress_s=110.0)
    found = locate_hang(given([works, gone(1, 51)], left(1)))
    assert not found.culprits


def test_a_rank_that_left_long_ago_hides_no_sleeper() -> None:
    asleep = replace(waits(2, 50), in_flight=(), streams=(StreamProgress("dp", int(Op.ALLREDUCE), -1, 9, 9),))
    stuck = replace(
        waits(0, 51),
        in_flight=(OpInFlight("dp", int(Op.ALLREDUCE), -1, 10, 100.0),),
        streams=(StreamProgress("dp", int(Op.ALLREDUCE), -1, 10, 9),),
    )
    evidence = given([stuck, gone(1, 50), asleep], left(1))
    evidence = replace(evidence, groups={**evidence.groups, "dp": GroupInfo("dp", (0, 2))})
    assert [c.rank for c in locate_hang(evidence).culprits] == [2]


def test_of_a_rank_that_nobody_tells_of_any_more_it_is_less_sure() -> None:
    found = locate_hang(given([waits(0, 51), waits(2, 51)], left(1)))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, "medium")]
    assert found.missing == ("states of ranks 1",)


def test_a_rank_that_runs_again_has_not_left() -> None:
    again = replace(gone(1, 50), alive=True, process_state="S", incarnation=1)
    found = locate_hang(given([waits(0, 51), again, waits(2, 51)], left(1)))
    assert [c.rank for c in found.culprits] == [1]
    assert "exit code 0" not in found.culprits[0].cause


def test_a_rank_that_was_seen_on_its_way_out_has_left() -> None:
    """Python takes long to end, and closes connections early."""
    ends = replace(gone(1, 50), alive=True, process_state="R", incarnation=0)
    found = locate_crash(given([failed(waits(0, 51)), ends, failed(waits(2, 51))], left(1), died(0), died(2)))
    assert [c.cause for c in found.culprits] == ["left with exit code 0"]


def test_before_its_first_step() -> None:
    first = replace(waits(0, 1), step=-1)
    found = locate_hang(given([first, gone(1, 0, -1), replace(waits(2, 1), step=-1)], left(1, 0)))
    assert "before its first step while" in found.culprits[0].detail


def twin(world: int, early: dict[int, int], extra: int | None) -> set[int]:
    """Who is to blame when ranks ``early`` left after so many calls, or all but ``extra`` after as many."""
    return (
        {extra}
        if extra is not None
        else {rank for rank, made in early.items() if made == min(early.values())}
    )


@pytest.mark.parametrize("seed", range(200))
def test_whoever_it_is(seed: int) -> None:
    dice = random.Random(seed)
    world = dice.choice((3, 4, 8))
    ranks = list(range(world))
    dice.shuffle(ranks)
    if dice.random() < 0.5:
        early = {rank: dice.choice((40, 40, 45)) for rank in ranks[: dice.randint(1, (world - 1) // 2)]}
        states = [gone(r, made, made - 1) for r, made in early.items()]
        first = min(early.values())
        states += [waits(r, first + 1) for r in ranks if r not in early]
        wanted = twin(world, early, None)
        early_ranks = list(early)
    else:
        extra, early_ranks = ranks[0], ranks[1:]
        states = [gone(r, 60) for r in early_ranks] + [waits(extra, 61, op=Op.BARRIER, repeats=False)]
        wanted = twin(world, {}, extra)
    if dice.random() < 0.5:
        waiting = [s.rank for s in states if s.in_flight]
        states = [failed(s) if s.in_flight else s for s in states]
        found: Diagnosis = locate_crash(given(states, *map(left, early_ranks), *map(died, waiting)))
    else:
        found = locate_hang(given(states, *map(left, early_ranks)))
    assert {c.rank for c in found.culprits} == wanted
    assert not wanted & set(found.victims)


@pytest.mark.parametrize("made", [43, 47])
def test_of_calls_on_a_device_one_that_left_has_ended_none_whatever_it_had_called(made: int) -> None:
    flights = tuple(OpInFlight("0", int(Op.ALLREDUCE), -1, seq, 100.0) for seq in range(44, 48))
    told = DeviceCalls(flights, (StreamProgress("0", int(Op.ALLREDUCE), -1, 47, 43),))
    called = replace(gone(0, 47), alive=True, process_state="S", device=told)
    evidence = given([called, gone(1, made)], left(1))
    found = locate_hang(replace(evidence, groups={"0": GroupInfo("0", (0, 1), backend="nccl")}))
    (culprit,) = found.culprits
    assert (culprit.rank, culprit.cause, culprit.confidence) == (1, "left with exit code 0", "medium")
