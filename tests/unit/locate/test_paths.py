from __future__ import annotations

import dataclasses

import pytest
from tests.unit.locate.blamed import link_of
from tests.unit.locate.synthetic_hangs import Stuck
from tests.unit.locate.synthetic_jobs import ddp, dp_pp

from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit, Diagnosis, Link
from keepstep.core.summary import PathProbe, PeerTraffic
from keepstep.locate import locate_hang, with_probes
from keepstep.locate._paths import pairs_among

NODES = ("n0", "n1", "n2", "n3")


def probes(lost=(), slow=(), outcome="timeout"):
    """Every node to every other; nothing comes back between the lost pairs, late between the slow ones."""
    found = []
    for source in NODES:
        for target in NODES:
            if source == target:
                continue
            if {source, target} in [set(pair) for pair in lost]:
                found.append(PathProbe(source, target, outcome, 2.5))
            else:
                late = {source, target} in [set(pair) for pair in slow]
                found.append(PathProbe(source, target, "echo", 0.7 if late else 0.0004))
    return found


def traffic(source, target, *, busy_s, nbytes, before=(4.0, 40_000_000)):
    """What ``source`` sent to ``target``; the other direction is there and idle, so that both addresses are known."""
    return [
        PeerTraffic(source, f"10.0.0.{source}", f"10.0.0.{target}", 10.0, before[1], before[0], 12.0, nbytes, busy_s),
        PeerTraffic(target, f"10.0.0.{target}", f"10.0.0.{source}", 10.0, before[1], before[0], 12.0, 0, 0.0),
    ]  # fmt: skip


def stuck_ring(seq=2):
    job = ddp(8)
    return job, Stuck(job, broken=[("world", seq)]).states()


def test_a_probe_that_does_not_come_back_breaks_the_path():
    job, states = stuck_ring()
    before = locate_hang(Evidence(job.infos, job.nodes, states=states))
    assert before.culprits == ()
    assert set(before.paths) == {(a, b) for a in NODES for b in NODES if a < b}
    found = locate_hang(Evidence(job.infos, job.nodes, states=states, probes=probes([("n1", "n2")])))
    (culprit,) = found.culprits
    assert (link_of(culprit).nodes, culprit.cause, culprit.confidence) == (
        ("n1", "n2"),
        "path broken",
        "high",
    )
    assert [job.nodes[rank] for rank in link_of(culprit).ranks] == ["n1", "n2"]
    assert "probe n1 to n2: no answer in 2.5 s; back: no answer in 2.5 s" in found.evidence
    assert "probes of the other paths looked at (5) came back within 0.4 ms" in found.evidence
    assert not set(link_of(culprit).ranks) & set(found.victims)


def some_are_through(states, ranks):
    """All wait in an operation of the world; these got what they needed of it and wait in the next one."""
    found = []
    for state in states:
        (flight,) = state.in_flight
        (stream,) = (one for one in state.streams if one.group == flight.group and one.started == flight.seq)
        if state.rank in ranks:
            after = dataclasses.replace(stream, started=stream.started + 1, completed=stream.completed + 1)
            streams = tuple(after if one is stream else one for one in state.streams)
            state = dataclasses.replace(state, streams=streams)
            flight = dataclasses.replace(flight, seq=flight.seq + 1)
        found.append(dataclasses.replace(state, in_flight=(dataclasses.replace(flight, waits=True),)))
    return found


@pytest.mark.parametrize("last", [(5,), (4, 5), (2, 4)])
def test_a_cut_path_is_named_though_others_are_through(last):
    """Those that needed nothing more from over there go on to the next operation, and wait there for the last ones."""
    job, states = stuck_ring(4)
    states = some_are_through(states, set(range(8)) - set(last))
    before = locate_hang(Evidence(job.infos, job.nodes, states=states))
    assert ("n1", "n2") in before.paths
    assert all(culprit.confidence == "medium" for culprit in before.culprits)
    found = locate_hang(Evidence(job.infos, job.nodes, states=states, probes=probes([("n1", "n2")])))
    (culprit,) = found.culprits
    assert (link_of(culprit).nodes, culprit.cause, culprit.confidence) == (
        ("n1", "n2"),
        "path broken",
        "high",
    )
    assert f"{8 - len(last)} are through" in " ".join(found.evidence)
    sound = locate_hang(Evidence(job.infos, job.nodes, states=states, probes=probes()))
    assert [one.rank for one in sound.culprits] == list(last)
    assert {(one.cause, one.confidence) for one in sound.culprits} == {("did not finish", "high")}
    assert not set(last) & set(sound.victims)
    states = [dataclasses.replace(s, unread_bytes=80_000 if s.rank == last[-1] else 0) for s in states]
    (culprit,) = locate_hang(Evidence(job.infos, job.nodes, states=states, probes=probes())).culprits
    assert (culprit.rank, culprit.cause, culprit.confidence) == (last[-1], "does not read", "high")


def test_who_launched_what_others_are_through_and_fell_asleep_needs_no_probe():
    """The end of an asynchronous operation is seen only by who waits for it."""
    job, states = stuck_ring(4)
    states = some_are_through(states, set(range(8)) - {5})
    (flight,) = states[5].in_flight
    states[5] = dataclasses.replace(states[5], in_flight=(dataclasses.replace(flight, waits=False),))
    found = locate_hang(Evidence(job.infos, job.nodes, states=states))
    assert [(one.rank, one.confidence) for one in found.culprits] == [(5, "high")]
    assert found.paths == ()


def test_of_many_nodes_the_paths_of_those_left_behind_are_probed():
    names = [f"n{n}" for n in range(100)]
    assert pairs_among(names, {"n80"}) == [("n79", "n80"), ("n80", "n81")]
    assert pairs_among(names[:4], {"n1"}) == [("n0", "n1"), ("n1", "n2"), ("n1", "n3")]


def test_one_direction_is_enough():
    job, states = stuck_ring()
    one_way = [
        probe if (probe.source, probe.target) != ("n2", "n1") else PathProbe("n2", "n1", "unreachable", 0.1)
        for probe in probes()
    ]
    found = locate_hang(Evidence(job.infos, job.nodes, states=states, probes=one_way))
    assert [link_of(culprit).nodes for culprit in found.culprits] == [("n1", "n2")]
    assert "probe n1 to n2: answer after 0.4 ms; back: no route" in found.evidence


def test_all_paths_of_a_node_are_its_own_connection():
    job, states = stuck_ring()
    lost = [("n2", other) for other in ("n0", "n1", "n3")]
    found = locate_hang(Evidence(job.infos, job.nodes, states=states, probes=probes(lost)))
    assert {frozenset(link_of(culprit).nodes) for culprit in found.culprits} == {
        frozenset(pair) for pair in lost
    }
    assert {culprit.node for culprit in found.culprits} == {"n2"}


def test_sound_paths_mean_software_and_who_does_not_read_is_named():
    job, states = stuck_ring()
    found = locate_hang(Evidence(job.infos, job.nodes, states=states, probes=probes()))
    assert found.culprits == ()
    assert "the paths are sound: a member hangs in software" in found.evidence
    assert "stacks" in found.missing[0]
    states = [dataclasses.replace(s, unread_bytes=80_000 if s.rank == 5 else 0) for s in states]
    for told, confidence in (((), "medium"), (probes(), "high")):
        found = locate_hang(Evidence(job.infos, job.nodes, states=states, probes=told))
        (culprit,) = found.culprits
        assert (culprit.rank, culprit.cause, culprit.confidence) == (5, "does not read", confidence)
        assert 5 not in found.victims


def test_unread_data_of_most_members_names_nobody():
    job, states = stuck_ring()
    states = [dataclasses.replace(s, unread_bytes=80_000 if s.rank < 5 else 0) for s in states]
    assert locate_hang(Evidence(job.infos, job.nodes, states=states, probes=probes())).culprits == ()


@pytest.mark.parametrize(
    ("busy_s", "nbytes", "named", "said"),
    [
        (12.0, 0, True, "nothing of it arrived"),
        (12.0, 1_200_000, True, "at 1.0% of its speed before"),
        (12.0, 12 * 7_900_000, True, "at 79.0%"),
        (12.0, 12 * 8_200_000, False, ""),
        (0.4, 0, False, ""),
    ],
)
def test_data_that_does_not_arrive_marks_the_path(busy_s, nbytes, named, said):
    """Lost is 20 % of the speed that the same connections had before."""
    job, states = stuck_ring()
    seen = traffic("n3", "n0", busy_s=busy_s, nbytes=nbytes)
    for told in ((), probes()):
        found = locate_hang(Evidence(job.infos, job.nodes, states=states, traffic=seen, probes=told))
        assert bool(found.culprits) is named
        if named:
            assert set(link_of(found.culprits[0]).nodes) == {"n0", "n3"}
            assert (found.culprits[0].cause, found.culprits[0].confidence) == ("network", "medium")
            assert any(said in line for line in found.evidence)
            assert ("empty messages pass" in found.culprits[0].detail) is bool(told)


def test_an_answer_after_the_guard_time_marks_the_path():
    job, states = stuck_ring()
    found = locate_hang(Evidence(job.infos, job.nodes, states=states, probes=probes(slow=[("n0", "n1")])))
    assert [(link_of(c).nodes, c.confidence) for c in found.culprits] == [(("n0", "n1"), "medium")]


def test_a_message_between_two_ranks_tells_their_nodes():
    job = dp_pp(1, 4, per_node=1)
    stream = next(x for x in job.programs[1] if x[0] == "recv")
    states = Stuck(job, broken=[(stream[1], 1)]).states()
    found = locate_hang(Evidence(job.infos, job.nodes, states=states))
    assert [link_of(culprit).nodes for culprit in found.culprits] == [("n0", "n1")]
    assert ("n0", "n1") in found.paths
    sound = [PathProbe(a, b, "echo", 1e-4) for a in NODES for b in NODES if a != b]
    assert locate_hang(Evidence(job.infos, job.nodes, states=states, probes=sound)).culprits == ()


@pytest.mark.parametrize(
    ("outcome", "cause", "confidence"),
    [
        ("timeout", "node unreachable", "high"),
        ("silent", "silent", "medium"),
        ("refused", "silent", "medium"),
        ("echo", "silent", "medium"),
    ],
)
def test_a_silent_node_is_probed_by_those_it_works_with(outcome, cause, confidence):
    job = ddp(8)
    states = [s for s in Stuck(job, {2: 1}, iterations=3).states() if s.rank != 2]
    node = job.nodes[2]
    first = locate_hang(Evidence(job.infos, job.nodes, states=states, silent_nodes=[node]))
    assert {target for _, target in first.paths} == {node}
    assert len(first.paths) == 3
    seen = [PathProbe(source, target, outcome, 0.1) for source, target in first.paths]
    found = locate_hang(Evidence(job.infos, job.nodes, states=states, silent_nodes=[node], probes=seen))
    assert [(c.rank, c.cause, c.confidence) for c in found.culprits] == [(2, cause, confidence)]
    assert ("can be reached" in found.culprits[0].detail) is (outcome != "timeout")
    assert any("came back" in line if outcome == "echo" else node in line for line in found.evidence)


def test_a_slow_link_that_fails_its_probe_is_blamed_for_sure():
    link = Culprit(None, Link((0, 2), ("n0", "n1")), "", "transfer", 3.0, "medium", "network")
    said = Diagnosis("slow", (link,), (1, 3), ("one",), ())
    assert with_probes(said, ()) == said
    for seen, confidence in ((probes(slow=[("n0", "n1")]), "high"), (probes(), "medium")):
        found = with_probes(said, seen)
        assert found.culprits[0].confidence == confidence
        assert len(found.evidence) == 2
        assert with_probes(found, seen) == found


def test_a_silent_node_that_others_reach_is_cut_off_from_who_does_not_get_through():
    """The kernel's counters tell it before a probe has waited long enough; the silent node's own are not there."""
    job, states = stuck_ring()
    states = [state for state in states if job.nodes[state.rank] != "n1"]
    (held, _) = traffic("n0", "n1", busy_s=12.0, nbytes=0)
    told = {"traffic": [held], "addresses": {"10.0.0.n1": "n1"}}
    first = locate_hang(Evidence(job.infos, job.nodes, states=states, **told))
    assert {culprit.cause for culprit in first.culprits} == {"silent"}
    assert set(first.paths) == {("n0", "n1"), ("n2", "n1"), ("n3", "n1")}
    reached = [PathProbe("n2", "n1", "echo", 1e-4)]
    by_counters = locate_hang(Evidence(job.infos, job.nodes, states=states, probes=reached, **told))
    by_probe = locate_hang(
        Evidence(
            job.infos,
            job.nodes,
            states=states,
            probes=[*reached, PathProbe("n0", "n1", "timeout", 2.5)],
            **told,
        )
    )
    for found, confidence in ((by_counters, "medium"), (by_probe, "high")):
        (culprit,) = found.culprits
        assert (link_of(culprit).nodes, culprit.stage, culprit.confidence) == (
            ("n0", "n1"),
            "transfer",
            confidence,
        )
        assert not set(link_of(culprit).ranks) & set(found.victims)
        assert any("ranks 2-3" in text for text in found.missing)
