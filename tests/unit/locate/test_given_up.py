"""Deaths that only tell of others: the cause is who the dead waited for, by what their rings show."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.unit.locate.synthetic_hangs import Stuck
from tests.unit.locate.synthetic_jobs import ddp, dp_pp, dp_tp, fsdp

from keepstep.core.events import Op, Phase
from keepstep.core.evidence import Evidence
from keepstep.core.finding import Finding
from keepstep.core.node_clocks import ClockOffsets, NodeClock
from keepstep.core.summary import GroupInfo, OpInFlight, RankState, StreamProgress
from keepstep.locate import locate_crash

TIMED_OUT = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 6000ms for recv operation"
)
LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41234"
NAMES_1 = "RuntimeError: [Rank 0]: Ranks 1 failed to pass monitoredBarrier in 10000 ms"
JOBS = {
    "pp4": lambda: dp_pp(1, 4),
    "dp2-pp2": lambda: dp_pp(2, 2),
    "dp2-tp4": lambda: dp_tp(2, 4),
    "ddp4": lambda: ddp(4),
    "fsdp4": lambda: fsdp(4),
}


def death(rank: int, time_s: float, message: str = "", code: int = 1, node: str = "n0") -> Finding:
    return Finding("crash", rank, node, time_s, 41, exit_code=code, message=message)


def gave_up(state: RankState, at_s: float) -> RankState:
    """The state of a rank that failed in what it was in, and has died."""
    flights = tuple(replace(one, failed_s=at_s) for one in state.in_flight)
    inside = {(one.group, one.peer) for one in flights}
    streams = tuple(
        replace(one, completed=one.started) if (one.group, one.peer) in inside else one
        for one in state.streams
    )
    return replace(
        state,
        alive=False,
        process_state="",
        in_flight=(),
        failed=flights,
        streams=streams,
        last_progress_s=at_s,
    )


def ended(state: RankState) -> RankState:
    """The state of a rank that the launcher has ended: its ring shows what it was in."""
    return replace(state, alive=False, process_state="")


def waits(
    rank: int, since_s: float = 100.0, seq: int = 41, group: str = "0", op: Op = Op.ALLREDUCE
) -> RankState:
    flight = OpInFlight(group, int(op), -1, seq, since_s, "train.py:15 main", True)
    streams = (StreamProgress(group, int(op), -1, seq, seq - 1),)
    return RankState(rank, True, 40, int(Phase.BACKWARD), since_s, 9, since_s, 107.0, (flight,), streams, "S")


def sleeps(rank: int, seq: int = 40) -> RankState:
    streams = (StreamProgress("0", int(Op.ALLREDUCE), -1, seq, seq),)
    return RankState(rank, True, 40, int(Phase.FORWARD), 99.0, 9, 99.0, 107.0, (), streams, "S")


def given(states: Iterable[RankState], *deaths: Finding, nodes: int = 1) -> Evidence:
    told = list(states)
    world = max(state.rank for state in told) + 1
    names = {rank: f"n{rank % nodes}" for rank in range(world)}
    return Evidence({"0": GroupInfo("0", tuple(range(world)))}, names, states=told, findings=deaths)


def test_who_timed_out_first_is_a_victim() -> None:
    states = [gave_up(waits(0), 106.0), ended(sleeps(1)), gave_up(waits(2), 106.0)]
    found = locate_crash(given(states, death(0, 106.4, TIMED_OUT)))
    (culprit,) = found.culprits
    assert (found.kind, culprit.rank, culprit.confidence) == ("crash", 1, "high")
    assert "never entered group 0 ALLREDUCE seq 41" in f"{culprit.cause} {culprit.detail}"
    assert found.victims == (0, 2)
    assert found.summary == "rank 0 gave up waiting for rank 1 in ALLREDUCE at train.py:15 main"
    assert found.evidence[0].startswith(
        "rank 0 failed after 6 s in ALLREDUCE at train.py:15 main: RuntimeError"
    )
    assert not any("process gone" in line for line in found.evidence)


def test_words_are_not_needed_where_the_ring_shows_the_wait() -> None:
    states = [gave_up(waits(0), 106.0), ended(sleeps(1)), ended(waits(2))]
    found = locate_crash(given(states, death(0, 106.4)))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, "high")]


def test_a_victim_whose_process_still_winds_up_is_none_to_wait_for() -> None:
    winds_up = replace(gave_up(waits(2), 106.0), alive=True, process_state="S")
    found = locate_crash(given([gave_up(waits(0), 106.0), sleeps(1), winds_up], death(0, 106.4, TIMED_OUT)))
    assert [c.rank for c in found.culprits] == [1]
    assert found.victims == (0, 2)


def test_who_comes_after_the_others_have_given_up_did_not_come() -> None:
    late = replace(waits(1, since_s=106.2), process_state="S")
    states = [gave_up(waits(0), 106.0), late, gave_up(waits(2), 106.0)]
    found = locate_crash(given(states, death(0, 106.4, TIMED_OUT), death(2, 106.4, TIMED_OUT)))
    assert [c.rank for c in found.culprits] == [1]
    too = [states[0], gave_up(late, 106.3), states[2]]
    found = locate_crash(given(too, death(0, 106.4, TIMED_OUT), death(1, 106.5, LOST)))
    assert found.summary.startswith("rank 0 gave up waiting for rank 1 in ALLREDUCE")
    assert found.victims == (0, 2)


def test_on_another_node_that_takes_clocks() -> None:
    late = replace(waits(1, since_s=5106.2), process_state="S")
    evidence = given([gave_up(waits(0), 106.0), late], death(0, 106.4, TIMED_OUT), nodes=2)
    assert not any(c.confidence == "high" for c in locate_crash(evidence).culprits)
    clocks = {"n0": NodeClock(0, 0, 0, 0, 0), "n1": NodeClock(-5000.0, 0, 5000.0, 0.001, 0)}
    found = locate_crash(replace(evidence, clocks=ClockOffsets("n0", clocks)))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, "high")]


def test_who_was_a_moment_later_than_one_that_lost_its_connection_is_a_victim() -> None:
    states = [gave_up(waits(0), 100.001), gave_up(waits(1, since_s=100.02), 100.021)]
    found = locate_crash(given(states, death(0, 100.3, LOST), death(1, 100.3, LOST)))
    assert found.culprits == ()


def test_who_has_not_come_is_less_surely_the_one_that_closed_the_connections() -> None:
    states = [gave_up(waits(0), 100.1), ended(sleeps(1)), gave_up(waits(2), 100.1)]
    found = locate_crash(given(states, death(0, 100.4, LOST)))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, "medium")]
    found = locate_crash(given([states[0], states[1], ended(sleeps(2))], death(0, 100.4, LOST)))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, "low"), (2, "low")]


def test_the_cause_of_lost_connections_is_not_guessed_among_those_that_lost_them() -> None:
    states = [gave_up(waits(rank), 100.1) for rank in range(3)]
    found = locate_crash(given(states, *(death(rank, 100.4, LOST) for rank in range(3))))
    assert found.culprits == ()
    assert found.victims == (0, 1, 2)
    assert found.missing[0].startswith("the first death")


def test_who_lost_its_connection_is_not_the_one_that_closed_it_where_a_state_is_missing() -> None:
    """Rank 1 had sent its share and gone on to the next collective; of rank 2, whose node is lost, nothing is known."""
    states = [gave_up(waits(0), 100.1), gave_up(waits(1, seq=42), 100.1)]
    evidence = given([*states, sleeps(2)], death(0, 100.4, LOST))
    assert [c.rank for c in locate_crash(replace(evidence, states=states)).culprits] != [0]


def test_who_died_of_a_wait_that_is_not_recorded_is_no_root() -> None:
    """Rank 1 waited for a key in the store, and the others for rank 1: whom it waited for is not known."""
    states = [gave_up(waits(0), 106.0), ended(sleeps(1)), ended(waits(2))]
    key = "torch.distributed.DistStoreError: wait timeout after 6000ms, keys: /key"
    found = locate_crash(given(states, death(1, 105.0, key), death(0, 106.4, TIMED_OUT)))
    assert found.culprits == ()


def test_an_error_of_its_own_comes_before_any_wait() -> None:
    states = [gave_up(waits(0), 100.1), ended(sleeps(1)), gave_up(waits(2), 100.1)]
    found = locate_crash(given(states, death(0, 100.2, LOST), death(1, 100.3, "ValueError: bad batch")))
    assert [(c.rank, c.cause, c.confidence) for c in found.culprits] == [(1, "process died", "high")]


def test_an_error_after_others_have_lost_patience_is_not_their_cause() -> None:
    states = [gave_up(waits(0), 106.0), ended(sleeps(1)), ended(waits(2))]
    ending = death(2, 109.0, "RuntimeError: interrupted in my own handler of SIGTERM")
    found = locate_crash(given(states, death(0, 106.4, TIMED_OUT), ending))
    assert [c.rank for c in found.culprits] == [1]
    assert found.victims == (0, 2)


def test_a_process_that_crashes_at_its_end_has_lost_a_peer_first() -> None:
    states = [gave_up(waits(0), 106.0), ended(sleeps(1)), ended(waits(2))]
    found = locate_crash(given(states, death(0, 106.4, code=139)))
    assert [c.rank for c in found.culprits] == [1]


def test_a_killed_process_is_a_cause_whatever_it_was_in() -> None:
    states = [gave_up(waits(0), 100.1), ended(waits(1)), gave_up(waits(2), 100.1)]
    found = locate_crash(given(states, death(0, 100.2, LOST), death(1, 100.3, code=137)))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, "high")]


def test_ranks_that_words_name_are_named_less_surely_than_by_the_operations() -> None:
    nothing = [replace(sleeps(rank), alive=rank != 0) for rank in range(3)]
    found = locate_crash(given(nothing, death(0, 110.0, NAMES_1)))
    assert [(c.rank, c.confidence, c.cause) for c in found.culprits] == [(1, "medium", "did not come")]
    assert found.victims == (0,)
    seen = [gave_up(waits(0, op=Op.BARRIER), 110.0), ended(waits(1, op=Op.BARRIER)), ended(sleeps(2))]
    found = locate_crash(given(seen, death(0, 110.4, NAMES_1)))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(2, "high")]


def test_an_unknown_state_makes_it_less_sure() -> None:
    states = [gave_up(waits(0), 106.0), ended(sleeps(1))]
    evidence = replace(given([*states, waits(2)], death(0, 106.4, TIMED_OUT)), states=states)
    assert [(c.rank, c.confidence) for c in locate_crash(evidence).culprits] == [(1, "medium")]


@pytest.mark.parametrize("name", JOBS)
def test_whoever_sleeps_and_whoever_dies_first(name: str) -> None:
    """Every rank asleep at many places; ranks drawn by chance have died, are ended, or still wait."""
    dice = random.Random(name)
    job = JOBS[name]()
    for rank in range(job.world):
        for position in range(1, 2 * len(job.programs[rank]), 3):
            states = Stuck(job, {rank: position}, iterations=3).states()
            inside = [state.rank for state in states if state.in_flight]
            dead = set(dice.sample(inside, dice.randint(1, len(inside))))
            at_s = states[0].now_s
            told = [
                gave_up(s, at_s) if s.rank in dead else dice.choice((ended, lambda s: s))(s) for s in states
            ]
            words = dice.choice((TIMED_OUT, ""))
            deaths = [death(r, at_s + 0.3, words, node=job.nodes[r]) for r in sorted(dead)]
            found = locate_crash(Evidence(job.infos, job.nodes, states=told, findings=deaths))
            assert [c.rank for c in found.culprits] == [rank], (position, dead, found)
            assert set(found.victims) >= dead
