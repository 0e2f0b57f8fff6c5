from __future__ import annotations

import pytest

from keepstep.core.events import Op, Phase
from keepstep.core.evidence import Evidence
from keepstep.core.finding import Finding
from keepstep.core.node_clocks import ClockOffsets, NodeClock
from keepstep.core.summary import OpInFlight, RankState
from keepstep.locate import locate_crash

CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41234"


def crash(rank, time_s, message="", code=1, node="n0", phase=Phase.BACKWARD):
    return Finding("crash", rank, node, time_s, 12, exit_code=code, message=message, phase=int(phase))


def test_the_first_to_die_of_its_own_doing():
    found = locate_crash(
        Evidence(
            {},
            {},
            findings=[
                crash(0, 10.1, CLOSED),
                crash(2, 10.0, "ValueError: bad batch"),
                crash(3, 10.2, CLOSED),
            ],
        )
    )
    assert [(c.rank, c.cause, c.stage, c.confidence) for c in found.culprits] == [
        (2, "process died", "backward", "high")
    ]
    assert "ValueError: bad batch" in found.culprits[0].detail
    assert found.victims == (0, 3)
    assert found.summary == "rank 2 died (exit code 1): ValueError: bad batch"


def test_an_error_about_a_connection_is_a_consequence_even_when_seen_first():
    found = locate_crash(Evidence({}, {}, findings=[crash(0, 9.9, CLOSED), crash(1, 10.0, code=137)]))
    assert [c.rank for c in found.culprits] == [1]
    assert "SIGKILL" in found.culprits[0].detail


def test_ended_by_the_launcher_is_a_consequence():
    found = locate_crash(Evidence({}, {}, findings=[crash(0, 10.0, code=143), crash(1, 10.3, code=139)]))
    assert [c.rank for c in found.culprits] == [1]
    assert "SIGSEGV" in found.summary


@pytest.mark.parametrize(
    "message",
    [
        CLOSED,
        "torch.distributed.DistBackendError: NCCL error: remote process exited",
        "RuntimeError: Socket closed",
        "RuntimeError: Connection reset by peer",
    ],
)
def test_of_deaths_that_only_tell_of_others_nobody_is_named(message):
    found = locate_crash(Evidence({}, {}, findings=[crash(0, 10.0, message), crash(1, 11.0, message)]))
    assert found.culprits == ()
    assert any("first death" in text for text in found.missing)
    assert found.victims == (0, 1)


def test_the_same_error_everywhere_looks_like_the_program():
    found = locate_crash(
        Evidence({}, {}, findings=[crash(r, 10.0 + r / 100, f"KeyError: rank {r}") for r in range(4)])
    )
    assert len(found.culprits) == 4
    assert {c.confidence for c in found.culprits} == {"low"}
    assert any("same error" in line for line in found.evidence)


def test_clocks_order_deaths_on_different_nodes():
    deaths = [crash(0, 10.0, "A", node="n0"), crash(1, 7205.0, "B", node="n1")]
    blind = locate_crash(Evidence({}, {}, findings=deaths))
    assert {c.rank for c in blind.culprits} == {0, 1}
    assert any("clock offsets" in text for text in blind.missing)
    clocks = {"n0": NodeClock(0, 0, 0, 0, 0), "n1": NodeClock(-7200.0, 0, 7000.0, 0.001, 0)}
    seen = locate_crash(Evidence({}, {}, ClockOffsets("n0", clocks), findings=deaths))
    assert [c.rank for c in seen.culprits] == [1]


def test_ranks_left_waiting_are_victims():
    waiting = RankState(5, True, 12, 2, 0, 1, 0, 20, (OpInFlight("g", int(Op.ALLREDUCE), -1, 3, 10.0),))
    found = locate_crash(Evidence({}, {}, findings=[crash(2, 10.0, "boom")], states=[waiting]))
    assert found.victims == (5,)


def test_reported_twice_counts_once():
    found = locate_crash(Evidence({}, {}, findings=[crash(2, 10.0, code=1), crash(2, 10.4, "ValueError: x")]))
    assert [c.rank for c in found.culprits] == [2]
    assert "ValueError: x" in found.summary


def test_two_that_were_killed_at_once_are_both_named():
    killed = [crash(1, 10.0, code=137), crash(5, 10.1, code=137)]
    echoes = [crash(rank, 10.05, CLOSED) for rank in (0, 2, 3)]
    nodes = dict.fromkeys(range(8), "n0")
    found = locate_crash(Evidence({}, nodes, findings=[*echoes, *killed]))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, "high"), (5, "high")]
    assert found.victims == (0, 2, 3)


def test_a_whole_job_that_is_killed_blames_nobody_for_sure():
    nodes = dict.fromkeys(range(3), "n0")
    found = locate_crash(Evidence({}, nodes, findings=[crash(rank, 10.0, code=137) for rank in nodes]))
    assert {c.confidence for c in found.culprits} == {"low"}


def test_a_death_without_words_is_not_blamed_for_sure():
    found = locate_crash(Evidence({}, {}, findings=[crash(1, 10.0), crash(0, 10.1, CLOSED)]))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(1, "medium")]
    assert found.missing == ("the last words of rank 1",)


def test_a_signal_that_asks_to_end_is_blamed_only_if_nothing_else_is_known():
    nodes = dict.fromkeys(range(4), "n0")
    alone = locate_crash(Evidence({}, nodes, findings=[crash(2, 10.0, code=143), crash(0, 10.1, CLOSED)]))
    assert [(c.rank, c.confidence) for c in alone.culprits] == [(2, "medium")]
    all_of_them = [crash(rank, 10.0, code=143) for rank in nodes]
    assert locate_crash(Evidence({}, nodes, findings=all_of_them)).culprits == ()


def test_an_exit_code_that_is_no_signal_says_nothing():
    found = locate_crash(
        Evidence({}, {}, findings=[crash(0, 9.9, code=255), crash(1, 10.0, "ValueError: x")])
    )
    assert not any(c.rank == 0 and c.confidence == "high" for c in found.culprits)


@pytest.mark.parametrize("words", ["shutting down", "UserWarning: There appear to be 1 leaked objects"])
def test_words_that_name_no_error_do_not_make_a_victim_the_culprit(words):
    flight = OpInFlight("dp", Op.ALLREDUCE, -1, 7, 0.0)
    lost = RankState(0, False, 12, 2, 0.0, 10, 9.0, 11.0, failed=(flight,))
    found = locate_crash(Evidence({}, {}, states=[lost], findings=[crash(0, 9.9, words)]))
    assert not any(c.rank == 0 and c.confidence == "high" for c in found.culprits)


def test_no_death():
    assert locate_crash(Evidence({}, {}, findings=[])).missing


def test_of_several_that_were_sent_sigterm_nobody_is_to_blame():
    nodes = dict.fromkeys(range(4), "n0")
    found = locate_crash(Evidence({}, nodes, findings=[crash(rank, 10.0, code=143) for rank in (2, 3)]))
    assert found.culprits == ()
    assert found.summary == "ranks 2-3 killed by SIGTERM, from outside"
    assert found.missing[0] == "who sent the signal"
    alone = locate_crash(Evidence({}, nodes, findings=[crash(2, 10.0, code=143)]))
    assert [one.rank for one in alone.culprits] == [2]
    own = locate_crash(
        Evidence(
            {}, nodes, findings=[crash(1, 9.9, "KeyError: 1"), *(crash(r, 10.0, code=143) for r in (2, 3))]
        )
    )
    assert [one.rank for one in own.culprits] == [1]
