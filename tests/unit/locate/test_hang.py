from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.unit.locate.blamed import link_of
from tests.unit.locate.synthetic_hangs import Stuck
from tests.unit.locate.synthetic_jobs import ddp, dp_pp, dp_tp, fsdp

from keepstep.core.events import Op, Phase
from keepstep.core.evidence import Evidence
from keepstep.core.summary import GroupInfo, LinkState, OpInFlight, RankState, StreamProgress
from keepstep.locate import locate_hang

JOBS = {
    "pp4": lambda: dp_pp(1, 4),
    "dp2-pp2": lambda: dp_pp(2, 2),
    "dp4-pp2": lambda: dp_pp(4, 2, own_groups=True),
    "dp2-tp4": lambda: dp_tp(2, 4),
    "ddp4": lambda: ddp(4),
    "fsdp4": lambda: fsdp(4),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("rendezvous", [False, True])
def test_asleep_anywhere(name, rendezvous):
    """Every rank, asleep before every instruction of its first two iterations."""
    job = JOBS[name]()
    for rank in range(job.world):
        for position in range(1, 2 * len(job.programs[rank])):
            late = {rank} if position % 2 else set()
            stuck = Stuck(job, {rank: position}, rendezvous=rendezvous, iterations=3, late_ends=late)
            found = locate_hang(Evidence(job.infos, job.nodes, states=stuck.states(hours=2.0)))
            assert [c.rank for c in found.culprits] == [rank], (position, found)
            assert found.kind == "hang"
            assert rank not in found.victims


def test_a_rank_asleep_in_backward_reads_like_this():
    job = dp_tp(2, 4)
    position = next(i for i, x in enumerate(job.programs[5]) if x[:2] == ("compute", "backward")) + 1
    found = locate_hang(Evidence(job.infos, job.nodes, states=Stuck(job, {5: position}).states()))
    culprit = found.culprits[0]
    assert (culprit.rank, culprit.node, culprit.stage) == (5, "n2", "backward")
    assert (culprit.cause, culprit.confidence) == ("asleep in backward", "high")
    assert "never entered group t1 ALLREDUCE seq 5" in culprit.detail
    assert found.summary == "group t1 ALLREDUCE seq 5 stuck 20 s"
    assert found.victims == (0, 1, 2, 3, 4, 6, 7)
    assert found.evidence[:2] == ("8/8 ranks reporting", "4 ranks wait for them directly, 3 through others")
    assert found.missing == ()


@pytest.mark.parametrize(("how", "cause"), [("dead", "process died"), ("stopped", "stopped")])
@pytest.mark.parametrize("name", JOBS)
def test_dead_and_stopped_processes(name, how, cause):
    job = JOBS[name]()
    them: dict[str, Any] = {how: {1}}
    for position in range(1, len(job.programs[1]), 3):
        states = Stuck(job, {1: position}, iterations=3).states(**them)
        found = locate_hang(Evidence(job.infos, job.nodes, states=states))
        assert [(c.rank, c.cause, c.confidence) for c in found.culprits] == [(1, cause, "high")]


def test_stopped_inside_an_operation_that_all_have_entered():
    job = ddp(4)
    states = Stuck(job, broken=[("world", 2)]).states(stopped={3})
    found = locate_hang(Evidence(job.infos, job.nodes, states=states))
    assert [c.rank for c in found.culprits] == [3]
    assert found.victims == (0, 1, 2)


@pytest.mark.parametrize("name", JOBS)
def test_a_silent_rank_is_the_last_suspect(name):
    job = JOBS[name]()
    for position in range(1, len(job.programs[2]), 4):
        states = [s for s in Stuck(job, {2: position}, iterations=3).states() if s.rank != 2]
        found = locate_hang(Evidence(job.infos, job.nodes, states=states, silent_nodes=["n1"]))
        assert [(c.rank, c.cause, c.confidence) for c in found.culprits] == [(2, "silent", "medium")]
        assert any("ranks 2" in text for text in found.missing)


def test_the_root_is_found_without_its_victims():
    job = dp_tp(4, 4)
    states = [s for s in Stuck(job, {6: 5}).states() if s.rank not in (1, 9, 14)]
    found = locate_hang(Evidence(job.infos, job.nodes, states=states))
    assert [(c.rank, c.confidence) for c in found.culprits] == [(6, "medium")]
    assert found.missing == ("states of ranks 1,9,14",)


def test_two_asleep_in_different_replicas():
    job = dp_pp(2, 4)
    found = locate_hang(Evidence(job.infos, job.nodes, states=Stuck(job, {0: 8, 5: 8}).states()))
    assert {c.rank for c in found.culprits} == {0, 5}


@pytest.mark.parametrize("name", ["dp2-pp2", "dp2-tp4", "dp4-pp2"])
def test_a_transfer_that_does_not_end(name):
    job = JOBS[name]()
    for group in ("g0", "g1", "t0", "d1"):
        if group not in job.groups:
            continue
        found = locate_hang(Evidence(job.infos, job.nodes, states=Stuck(job, broken=[(group, 1)]).states()))
        assert all(c.link is not None and c.cause == "network" for c in found.culprits), found
        nodes = {job.nodes[rank] for rank in job.groups[group]}
        if len(nodes) == 2:
            assert set(link_of(found.culprits[0]).nodes) == nodes
        assert any("none is through" in line for line in found.evidence)


def test_a_stuck_group_over_many_nodes_names_nobody():
    job = ddp(8)
    found = locate_hang(Evidence(job.infos, job.nodes, states=Stuck(job, broken=[("world", 3)]).states()))
    assert found.culprits == ()
    assert "n[0-3]" in found.missing[0]
    assert found.summary.startswith("group world ALLREDUCE seq 3 stuck")


def state(rank, flights=(), streams=(), process="S", phase=Phase.BACKWARD, since=10.0):
    return RankState(
        rank, True, 3, int(phase), since, 9, since, 30.0, tuple(flights), tuple(streams), process
    )


def test_different_operations_under_one_number():
    info = {"g": GroupInfo("g", (0, 1, 2))}
    ops = [Op.ALLREDUCE, Op.ALLREDUCE, Op.BROADCAST]
    states = [
        state(r, [OpInFlight("g", int(op), -1, 4, 10.0)], [StreamProgress("g", int(op), -1, 4, 3)])
        for r, op in enumerate(ops)
    ]
    found = locate_hang(Evidence(info, dict.fromkeys(range(3), "n0"), states=states))
    assert found.kind == "desync"
    assert [c.rank for c in found.culprits] == [2]
    assert any("ALLREDUCE" in line and "BROADCAST" in line for line in found.evidence)
    called = {Op.ALLREDUCE: "train.py:88 train", Op.BROADCAST: "train.py:93 log"}
    states = [
        dataclasses.replace(
            one, in_flight=(dataclasses.replace(one.in_flight[0], site=called[Op(one.in_flight[0].op)]),)
        )
        for one in states
    ]
    told = locate_hang(Evidence(info, dict.fromkeys(range(3), "n0"), states=states)).evidence
    assert "rank 2 in BROADCAST, ranks 0-1 in ALLREDUCE" in told
    assert "called by rank 2 at train.py:93 log, by ranks 0-1 at train.py:88 train" in told
    tied = locate_hang(Evidence({"g": GroupInfo("g", (1, 2))}, {1: "n0", 2: "n0"}, states=states[1:]))
    assert [(c.rank, c.confidence) for c in tied.culprits] == [(1, "low"), (2, "low")]


INDISTINCT = ("pp4", "fsdp4")  # each rank waits for another: it is said that this cannot be told


@pytest.mark.parametrize("name", JOBS)
def test_a_skipped_collective_is_never_blamed_on_another(name):
    job = JOBS[name]()
    for rank in range(job.world):
        for position, instruction in enumerate(job.programs[rank]):
            if instruction[0] not in ("coll", "async"):
                continue
            found = locate_hang(
                Evidence(
                    job.infos, job.nodes, states=Stuck(job, skips={rank: position}, iterations=3).states()
                )
            )
            named = [c.rank for c in found.culprits if c.confidence != "low"]
            if name in INDISTINCT:
                assert (named, bool(found.missing)) == ([], True), (rank, instruction, found)
            else:
                assert named == [rank], (rank, instruction, found)


def test_a_stage_that_calls_less_than_another_has_not_skipped_an_operation():
    """Two stages by two tensor-parallel ranks: rank 0 left out the call in "w" and is in the next one, in "m".

    The last stage, ranks 2 and 3, has made more calls in its tensor-parallel group, for the loss.
    """
    members = {"w": (0, 1, 2, 3), "m": (0, 1, 2, 3), "first": (0, 1), "last": (2, 3)}
    info = {name: GroupInfo(name, ranks) for name, ranks in members.items()}
    states = []
    for rank in range(4):
        group, seq = ("m", 13) if rank == 0 else ("w", 17)
        own, made = ("first", 130) if rank < 2 else ("last", 208)
        streams = [
            StreamProgress("w", int(Op.ALLREDUCE), -1, 16 + (rank > 0), 16),
            StreamProgress("m", int(Op.ALLREDUCE), -1, 12 + (rank == 0), 12),
            StreamProgress(own, int(Op.ALLREDUCE), -1, made, made),
            StreamProgress("w", int(Op.SEND), rank ^ 2, 26, 26),
            StreamProgress("w", int(Op.RECV), rank ^ 2, 26, 26),
        ]
        states.append(state(rank, [OpInFlight(group, int(Op.ALLREDUCE), -1, seq, 10.0)], streams))
    found = locate_hang(Evidence(info, dict.fromkeys(range(4), "n0"), states=states))
    assert found.kind == "desync"
    assert [(one.rank, one.confidence) for one in found.culprits] == [(0, "medium")]


def test_nobody_in_an_operation():
    found = locate_hang(
        Evidence({}, {0: "n0", 1: "n0"}, states=[state(r, phase=Phase.DATA) for r in range(2)])
    )
    assert found.culprits == ()
    assert "no rank is in an operation; phases: data" in found.evidence[-1]
    assert found.missing


def test_nothing_known():
    found = locate_hang(Evidence({}, {0: "n0", 1: "n1"}))
    assert found.culprits == ()
    assert found.evidence[0] == "0/2 ranks reporting"


def test_one_early_rank_accuses_nobody():
    info = {"w": GroupInfo("w", tuple(range(16)))}
    states = [
        state(
            0,
            [OpInFlight("w", int(Op.BARRIER), -1, 1, 10.0)],
            [StreamProgress("w", int(Op.BARRIER), -1, 1, 0)],
        )
    ]
    states += [state(r, process="R") for r in range(1, 16)]
    found = locate_hang(Evidence(info, dict.fromkeys(range(16), "n0"), states=states))
    assert found.culprits == ()
    assert any("ranks 1-15 have not entered" in line for line in found.evidence)


def test_the_place_in_the_code_is_told():
    job = ddp(2)
    states = Stuck(job, {1: 3}).states()
    stack = 'Thread 7 (idle): "MainThread"\n    slow_loss (train.py:41)\n    main (train.py:90)\n'
    whole = (
        f'Process 7: python -u train.py\nPython v3.11\n\nThread 9 (idle): "a"\n    run (a.py:3)\n\n{stack}'
    )
    for told in (stack, whole):
        states[1] = dataclasses.replace(states[1], stack=told)
        found = locate_hang(Evidence(job.infos, job.nodes, states=states))
        assert "at slow_loss (train.py:41)" in found.culprits[0].detail


def test_the_pipeline_stage_and_the_micro_batch_are_told():
    job = dp_pp(2, 4)
    position = next(i for i, x in enumerate(job.programs[5]) if x[:2] == ("compute", "backward")) + 1
    states = [
        dataclasses.replace(one, microbatch=3 if one.rank == 5 else -1)
        for one in Stuck(job, {5: position + len(job.programs[5])}, iterations=3).states()
    ]
    (culprit,) = locate_hang(Evidence(job.infos, job.nodes, states=states)).culprits
    assert culprit.rank == 5
    assert "in backward of micro-batch 3 for" in culprit.detail
    assert "pipeline stage 2" in culprit.detail
    one_way = [((r + 1) % 3, (r - 1) % 3) for r in range(3)]
    ring = [
        state(
            r,
            streams=[
                StreamProgress("g", int(Op.SEND), to, 4, 4),
                StreamProgress("g", int(Op.RECV), of, 4, 4),
            ],
            process="T" if r == 1 else "S",
        )
        for r, (to, of) in enumerate(one_way)
    ]
    (culprit,) = locate_hang(
        Evidence({"g": GroupInfo("g", (0, 1, 2))}, dict.fromkeys(range(3), "n0"), states=ring)
    ).culprits
    assert "pipeline stage" not in culprit.detail


def in_transfer(job, links):
    """All are in the same collective; ``links``: of each rank, where its transfers stand still."""
    return [
        dataclasses.replace(one, links=tuple(links.get(one.rank, ())))
        for one in Stuck(job, broken=[("world", 3)]).states()
    ]


def test_the_send_that_the_network_does_not_complete_is_named_before_anything_is_probed():
    job = ddp(8)
    links = {rank: [LinkState((rank - 1) % 8, "sender", 2, 12.0)] for rank in range(8)}
    links[5].append(LinkState(6, "network", 7, 12.5))
    found = locate_hang(Evidence(job.infos, job.nodes, states=in_transfer(job, links)))
    assert [(link_of(c).ranks, c.cause, c.confidence) for c in found.culprits] == [
        ((5, 6), "network", "high")
    ]
    assert found.culprits[0].detail == "rank 5 to rank 6: 7 steps in flight, none completed for 12 s"
    assert set(found.victims) == set(range(8)) - {5, 6}


def test_a_node_that_all_cut_links_have_in_common_is_named():
    job = ddp(8)
    ends = {1: 2, 2: 1, 3: 4, 4: 3}
    links = {rank: [LinkState(peer, "network", 1, 5.0)] for rank, peer in ends.items()}
    found = locate_hang(Evidence(job.infos, job.nodes, states=in_transfer(job, links)))
    assert {c.node for c in found.culprits} == {job.nodes[2]}


def test_a_gpu_that_moves_nothing_and_waits_for_nobody_is_named():
    job = ddp(8)
    links = {
        rank: [LinkState((rank - 1) % 8, "sender", 2, 9.0), LinkState((rank + 1) % 8, "gpu", 0, 9.0)]
        for rank in range(8)
    }
    links[3] = [LinkState(4, "gpu", 0, 9.0)]
    found = locate_hang(Evidence(job.infos, job.nodes, states=in_transfer(job, links)))
    assert [(c.rank, c.cause, c.stage) for c in found.culprits] == [(3, "its GPU stands still", "transfer")]


def test_links_that_moved_a_moment_ago_blame_nobody():
    job = ddp(8)
    found = locate_hang(
        Evidence(job.infos, job.nodes, states=in_transfer(job, {5: [LinkState(6, "network", 7, 0.1)]}))
    )
    assert found.culprits == ()


def ending(rank: int, phase: Phase) -> RankState:
    return RankState(rank, True, 40, int(phase), 980.0, 100, 980.0, 1000.0, process_state="S")


@pytest.mark.parametrize("phase", [Phase.OPTIMIZER, Phase.BACKWARD])
def test_a_rank_that_hangs_in_its_last_step_while_the_others_wind_up(phase):
    job = ddp(4)
    states = [ending(rank, phase if rank == 2 else Phase.TEARDOWN) for rank in range(4)]
    found = locate_hang(Evidence(job.infos, job.nodes, states=states))
    (culprit,) = found.culprits
    assert (culprit.rank, culprit.stage, culprit.confidence) == (2, phase.title, "medium")
    assert "ranks 0-1,3 have ended all steps, rank 2 not the last" in found.evidence


@pytest.mark.parametrize("phase", [Phase.TEARDOWN, Phase.FORWARD, Phase.CHECKPOINT])
def test_nobody_is_named_who_is_out_of_his_last_step(phase):
    job = ddp(4)
    states = [ending(rank, phase if rank == 2 else Phase.TEARDOWN) for rank in range(4)]
    assert locate_hang(Evidence(job.infos, job.nodes, states=states)).culprits == ()
