"""Ranks that call their collectives differently: who is named, how, and where; and that healthy ranks never are."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.effort import many
from tests.unit.locate.synthetic_desyncs import MISTAKES, Made, Mistake, Run, flat, training

from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Diagnosis
from keepstep.core.summary import GroupInfo, OpEnded, OpInFlight, RankState, StreamProgress
from keepstep.locate import locate_hang
from keepstep.locate.mismatch import calls_differ, locate_mismatch


def run_with(mistake: Mistake, seed: int, world: int) -> tuple[Run, int]:
    """A job in which one rank makes the mistake, run until nobody can go on; and that rank."""
    rng = random.Random(seed)
    groups, steps = training(rng, world)
    odd = rng.randrange(world)
    mistaken = mistake(rng, steps)
    scripts = [flat(mistaken if rank == odd else steps) for rank in range(world)]
    return Run(scripts, groups, seed=seed), odd


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("world", [3, 4, 8])
def test_the_odd_rank_of_many_is_named_and_nobody_else(mistake: Mistake, world: int) -> None:
    for seed in range(many(5)):
        run, odd = run_with(mistake, seed, world)
        found = locate_hang(run.evidence())
        assert [culprit.rank for culprit in found.culprits] == [odd], (seed, found)
        assert found.culprits[0].confidence != "low", (seed, found)
        assert odd not in found.victims


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_of_two_ranks_none_is_blamed_for_sure(mistake: Mistake) -> None:
    for seed in range(many(5)):
        run, odd = run_with(mistake, seed, 2)
        found = locate_hang(run.evidence())
        if mistake.__name__ == "left_early":
            assert [(c.rank, c.confidence) for c in found.culprits] == [(odd, "high")], (seed, found)
            continue
        blamed = {culprit.rank for culprit in found.culprits}
        assert not blamed or odd in blamed, (seed, found)
        assert {culprit.confidence for culprit in found.culprits} <= {"low"}, (seed, found)


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_on_their_way_never_differ(world: int) -> None:
    for seed in range(many(8)):
        rng = random.Random(seed)
        groups, steps = training(rng, world)
        run = Run([flat(steps)] * world, groups, moves=rng.randrange(1500), seed=seed)
        evidence = run.evidence()
        assert locate_mismatch(evidence) is None, seed
        assert not calls_differ(evidence.states, evidence.groups), seed


DIFFERING = [mistake for mistake in MISTAKES if mistake.__name__.startswith(("another_size", "another_op"))]


@pytest.mark.parametrize("mistake", DIFFERING, ids=lambda mistake: mistake.__name__)
def test_who_dies_or_fails_of_it_does_not_matter(mistake: Mistake) -> None:
    for seed in range(many(8)):
        rng = random.Random(seed)
        run, odd = run_with(mistake, seed, rng.choice([3, 4, 8]))
        states = run.states()
        for rank in rng.sample(range(len(states)), rng.randint(1, len(states))):
            states[rank] = rng.choice([aborted, raised])(states[rank])
        found = locate_mismatch(run.evidence(states))
        assert found is not None, seed
        assert found.kind == "desync"
        assert [culprit.rank for culprit in found.culprits] == [odd], (seed, found)
        assert any("a consequence" in line for line in found.evidence)
        assert odd not in found.victims


def aborted(state: RankState) -> RankState:
    """As when Gloo ends the process in the operation."""
    return replace(state, alive=False, process_state="")


def raised(state: RankState) -> RankState:
    """As when Gloo raises in the process, which then ends."""
    failed = tuple(replace(flight, failed_s=flight.since_s + 0.1) for flight in state.in_flight)
    return replace(state, alive=False, process_state="", in_flight=(), failed=failed)


# --- words --------------------------------------------------------------------------------------------------------


def in_it(
    rank: int, op: Op = Op.ALLGATHER, nbytes: int = 384, site: str = "train.py:16 <module>", **more
) -> RankState:
    more = {"element": "float32", **more}
    flight = OpInFlight("0", int(op), -1, 46, 10.0, site, True, bytes=nbytes, **more)
    stream = StreamProgress("0", int(op), -1, 46, 45)
    return RankState(rank, True, 40, 1, 10.0, 99, 10.0, 12.0, (flight,), (stream,), "S")


def judged(*states: RankState, world: int = 0) -> Diagnosis | None:
    members = tuple(range(max(world, len(states))))
    nodes = dict.fromkeys(members, "n0")
    return locate_mismatch(Evidence({"0": GroupInfo("0", members, "cpu:gloo")}, nodes, states=states))


def test_another_size_reads_like_this() -> None:
    found = judged(in_it(0), in_it(1, nbytes=240), in_it(2))
    assert found is not None
    assert found.summary == "group 0 ALLGATHER seq 46: sizes differ stuck 2 s"
    culprit = found.culprits[0]
    assert (culprit.rank, culprit.cause, culprit.confidence) == (1, "another size", "high")
    assert culprit.detail == "rank 1 in ALLGATHER of 80 B (20 float32), ranks 0,2 of 128 B (32 float32)"
    assert culprit.detail in found.evidence
    assert "all called it at train.py:16 <module>" in found.evidence
    assert found.victims == (0, 2)


def test_both_call_sites_are_told() -> None:
    log = in_it(1, Op.ALLREDUCE, 4, "train.py:16 <module>")
    backward = [in_it(rank, Op.ALLREDUCE, 260, "train.py:14 <module>") for rank in (0, 2, 3)]
    found = judged(log, *backward)
    assert found is not None
    assert "rank 1 in ALLREDUCE of 4 B (1 float32), ranks 0,2-3 of 260 B (65 float32)" in found.evidence
    assert (
        "called by rank 1 at train.py:16 <module>, by ranks 0,2-3 at train.py:14 <module>" in found.evidence
    )


def test_another_operation_and_another_type_are_told() -> None:
    found = judged(in_it(0), in_it(1, Op.BARRIER, 0, element=""), in_it(2))
    assert found is not None
    assert "rank 1 in BARRIER, ranks 0,2 in ALLGATHER of 128 B (32 float32)" in found.evidence
    assert found.culprits[0].cause == "entered another operation"
    found = judged(in_it(0), in_it(1, element="bfloat16"), in_it(2))
    assert found is not None
    assert found.culprits[0].cause == "another element type"
    found = judged(
        in_it(0, Op.ALLREDUCE, reduction="SUM"), *(in_it(r, Op.ALLREDUCE, reduction="MAX") for r in (1, 2))
    )
    assert found is not None
    assert found.culprits[0].cause == "another reduction"
    assert found.culprits[0].detail.startswith("rank 0 in ALLREDUCE SUM of 384 B")


def test_a_type_alone_explains_nothing_while_somebody_has_not_come() -> None:
    of_three = in_it(0), in_it(1, element="int32"), in_it(2)
    assert judged(*of_three) is not None
    assert judged(*of_three, world=4) is None  # of rank 3 nothing is known
    idle = RankState(3, True, 40, 1, 10.0, 99, 10.0, 12.0, (), (StreamProgress("0", 4, -1, 45, 45),), "S")
    assert judged(*of_three, idle) is None
    assert judged(in_it(0), in_it(1, nbytes=240), in_it(2), idle) is not None


def test_sizes_of_an_all_to_all_and_of_unknown_types_are_not_compared() -> None:
    assert judged(in_it(0, Op.ALLTOALL), in_it(1, Op.ALLTOALL, nbytes=240)) is None
    assert judged(in_it(0, element=""), in_it(1, element="", nbytes=240), in_it(2, element="")) is None
    assert judged(in_it(0), in_it(1, element="", nbytes=240), in_it(2)) is None


def test_what_ranks_call_after_an_error_does_not_count() -> None:
    failed = OpInFlight("0", int(Op.ALLREDUCE), -1, 45, 9.0, failed_s=11.0)
    states = [replace(in_it(rank), failed=(failed,)) for rank in range(3)]
    states[1] = replace(in_it(1, Op.BARRIER, 0, element=""), failed=(failed,))
    assert judged(*states) is None


def test_of_ranks_of_several_incarnations_only_the_newest_count() -> None:
    states = [
        replace(in_it(rank, nbytes=240 if rank == 1 else 384), incarnation=int(rank != 1))
        for rank in range(3)
    ]
    assert judged(*states) is None


def test_one_of_two_that_did_what_it_never_did_there_is_odd_with_low_confidence() -> None:
    found = judged(in_it(0, usual=39), in_it(1, Op.BARRIER, 0, "train.py:8 <module>", element="", usual=0))
    assert found is not None
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, "low")]
    assert "rank 1 had never called it after what came before; rank 0 had, 39 times" in found.evidence
    assert found.missing
    found = judged(in_it(0, usual=39), in_it(1, Op.BARRIER, 0, element="", usual=3))
    assert found is not None
    assert [(c.rank, c.confidence) for c in found.culprits] == [(0, "low"), (1, "low")]


def test_a_past_call_that_differed_is_found() -> None:
    def past(rank: int, nbytes: int) -> RankState:
        state = in_it(rank)
        ended = OpEnded(45, int(Op.ALLREDUCE), nbytes, "float32", site=f"train.py:{30 + rank % 2} step")
        return replace(state, streams=(replace(state.streams[0], ended=(ended,)),))

    found = judged(past(0, 48), past(1, 80), past(2, 48))
    assert found is not None
    assert found.summary.startswith("group 0 ALLREDUCE seq 45: sizes differ")
    assert [c.rank for c in found.culprits] == [1]


def test_the_minority_of_those_known_is_no_sure_culprit_among_many_unknown() -> None:
    found = judged(in_it(0), in_it(1, nbytes=240), in_it(2), world=8)
    assert found is not None
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, "medium")]


def test_two_threads_of_a_rank_on_one_group() -> None:
    def second(rank: int, nbytes: int, thread: int) -> RankState:
        state = in_it(rank, Op.ALLREDUCE, nbytes)
        own = replace(state.in_flight[0], thread=100)
        other = replace(own, seq=47, bytes=400 - nbytes, thread=thread, since_s=10.1)
        return replace(state, in_flight=(own, other))

    found = judged(second(0, 384, 101), second(1, 16, 101), second(2, 384, 101))
    assert found is not None
    assert [(c.rank, c.cause) for c in found.culprits] == [(1, "two threads on one group")]
    found = judged(second(0, 384, 100), second(1, 16, 100), second(2, 384, 100))
    assert found is not None
    assert found.culprits[0].cause == "another size"


@pytest.mark.parametrize(("others", "cause"), [(100, "two threads on one group"), (101, "another size")])
def test_two_threads_that_took_turns(others: int, cause: str) -> None:
    """A rank whose last calls came from two threads; on a GPU those of all ranks do."""

    def turns(rank: int, nbytes: int, thread: int) -> RankState:
        state = in_it(rank, Op.ALLREDUCE, nbytes, thread=100)
        past = OpEnded(45, int(Op.ALLREDUCE), 8, "float32", thread=thread)
        return replace(state, streams=(replace(state.streams[0], ended=(past,)),))

    found = judged(turns(0, 384, others), turns(1, 12, 101), turns(2, 384, others))
    assert found is not None
    assert [(c.rank, c.cause) for c in found.culprits] == [(1, cause)]


def test_a_call_of_one_rank_alone_blames_the_others_only_where_it_was_usual() -> None:
    def idle(rank: int) -> RankState:
        return RankState(
            rank, True, 40, 1, 9.0, 98, 9.0, 99.0, (), (StreamProgress("0", 1, -1, 45, 45),), "S"
        )

    def found_with(usual: int, process: str = "S") -> Diagnosis:
        states = [in_it(0, Op.ALLREDUCE, 4, "train.py:212 ghost", usual=usual), idle(1), idle(2)]
        states = [replace(state, process_state=process) for state in states]
        members = GroupInfo("0", (0, 1, 2), "cpu:gloo")
        return locate_hang(Evidence({"0": members}, dict.fromkeys(range(3), "n0"), states=states))

    assert [c.rank for c in found_with(12).culprits] == [1, 2]
    assert [c.rank for c in found_with(-1).culprits] == [1, 2]
    alone = found_with(0)
    assert alone.culprits == ()
    assert alone.missing
    assert any("train.py:212 ghost" in line for line in alone.evidence)
    over = found_with(0, "?")  # in a dump that was written when all had given up
    assert [(c.rank, c.confidence) for c in over.culprits] == [(0, "medium")]


def test_two_groups_in_another_order_tell_both_lines() -> None:
    shard = Made("0", Op.ALLREDUCE, 400, "train.py:7 shard")
    replicate = Made("1", Op.ALLREDUCE, 800, "train.py:8 replicate")
    usual, other = [shard, replicate] * 12, [replicate, shard]
    groups = {"0": (0, 1, 2), "1": (0, 1, 2)}
    run = Run([usual + usual, usual + other * 12, usual + usual], groups)
    found = locate_hang(run.evidence())
    assert found.kind == "desync"
    assert [(c.rank, c.cause, c.confidence) for c in found.culprits] == [
        (1, "another order of operations", "high")
    ]
    assert found.victims == (0, 2)
    assert "called by rank 1 at train.py:8 replicate, by ranks 0,2 at train.py:7 shard" in found.evidence
    of_two = Run([usual + usual, usual + other * 12], {"0": (0, 1), "1": (0, 1)})
    found = locate_hang(of_two.evidence())
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, "low")]


def test_a_rank_out_of_the_loop_of_the_others_has_left_it() -> None:
    others = [in_it(rank, Op.ALLREDUCE, 4, "/a/train.py:9 <module>") for rank in (0, 2)]
    gone = RankState(
        1,
        True,
        40,
        1,
        9.0,
        98,
        9.0,
        99.0,
        (),
        (StreamProgress("0", 1, -1, 45, 45),),
        "S",
        left_loop="/a/train.py:7-11",
    )
    evidence = Evidence(
        {"0": GroupInfo("0", (0, 1, 2))}, dict.fromkeys(range(3), "n0"), states=[*others, gone]
    )
    culprit = locate_hang(evidence).culprits[0]
    assert (culprit.rank, culprit.cause) == (1, "left the training loop")
    assert culprit.detail.startswith("it is out of /a/train.py:7-11, where ranks 0,2 still are")
    elsewhere = replace(gone, left_loop="/a/train.py:20-30")
    culprit = locate_hang(replace(evidence, states=[*others, elsewhere])).culprits[0]
    assert culprit.cause == "asleep in forward"


def test_what_cannot_end_needs_no_patience() -> None:
    def differ(*states: RankState) -> bool:
        return calls_differ(states, {"0": GroupInfo("0", tuple(range(len(states))), "cpu:gloo")})

    assert not differ(in_it(0), in_it(1), in_it(2))
    assert differ(in_it(0), in_it(1, Op.ALLREDUCE), in_it(2))
    assert differ(in_it(0, Op.ALLREDUCE), in_it(1, Op.ALLREDUCE, nbytes=240), in_it(2, Op.ALLREDUCE))
    # A library may gather parts of all sizes, and takes another type of the same size.
    assert not differ(in_it(0), in_it(1, nbytes=240), in_it(2))
    assert not differ(in_it(0), in_it(1, element="int32"), in_it(2))
