"""Who holds the others up, by the collectives that NCCL's RAS has counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.core.events import Op, Phase
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Diagnosis
from keepstep.core.launched import Launched, differing
from keepstep.core.summary import DeviceCalls, GroupInfo, RankState, StreamProgress
from keepstep.locate import locate_by_launched, wants_launched
from keepstep.traces.ras import read_ras

H100 = Path(__file__).parents[2] / "recorded" / "h100"
GROUP = GroupInfo("0", (0, 1, 2), "cuda:nccl", "default_pg")


def state(rank: int, launched: Mapping[str, Mapping[str, int]], size: int, **more: object) -> RankState:
    told = tuple(Launched(name, size, dict(counts)) for name, counts in launched.items())
    plain = RankState(rank, True, 30, Phase.BACKWARD, 90.0, 5, 90.0, 95.0, process_state="S", launched=told)
    return replace(plain, communicators_settled=True, **more)  # type: ignore[arg-type]


def evidence(states: list[RankState]) -> Evidence:
    group = replace(GROUP, members=tuple(one.rank for one in states))
    return Evidence({"0": group}, {one.rank: "n" for one in states}, states=states)


def located(*counts: int, size: int = 0) -> Diagnosis | None:
    """``counts``: of all-reduces, by rank."""
    states = [
        state(rank, {"0xa": {"AllReduce": count, "Broadcast": 4}}, size or len(counts))
        for rank, count in enumerate(counts)
    ]
    return locate_by_launched(evidence(states))


@pytest.mark.parametrize("case", ["asleep_before_backward", "barrier_of_one_rank"])
def test_the_rank_that_was_behind_on_a_gpu_is_named(case: str) -> None:
    (communicator,) = read_ras((H100 / case / "ras.json.txt").read_bytes()).communicators
    states = [
        state(rank, {communicator.name: one.counts}, communicator.size)
        for rank, one in communicator.ranks.items()
    ]
    found = locate_by_launched(evidence(states))
    assert found is not None
    assert [(one.rank, one.confidence) for one in found.culprits] == [(1, "medium")]
    assert found.victims == (0,)
    assert any(line.startswith(f"communicator {communicator.name} has launched") for line in found.evidence)


def test_one_collective_is_enough_while_all_stand_still() -> None:
    found = located(89, 88, 89)
    assert found is not None
    assert [(one.rank, one.cause) for one in found.culprits] == [(1, "asleep in backward")]


def test_nothing_is_said_of_equal_counts_or_where_a_rank_is_not_told() -> None:
    assert located(89, 89, 89) is None
    assert located(89, 88, size=3) is None


def test_a_circle_of_communicators_is_followed_to_its_root() -> None:
    """Rank 2 waits in one for rank 1, which waits in the other for rank 0."""
    states = [
        state(0, {"0xa": {"AllReduce": 10}}, 2),
        state(1, {"0xa": {"AllReduce": 11}, "0xb": {"AllGather": 7}}, 2),
        state(2, {"0xb": {"AllGather": 8}}, 2),
    ]
    found = locate_by_launched(evidence(states))
    assert found is not None
    assert [one.rank for one in found.culprits] == [0]
    assert set(found.victims) == {1, 2}


def test_counts_are_only_wanted_where_the_recorder_tells_nothing() -> None:
    calls = DeviceCalls((), (StreamProgress("0", 1, -1, 5, 4),))
    counts = {"0xa": {"AllReduce": 5}}
    told = [state(rank, counts, 2, device=calls) for rank in range(2)]
    assert not wants_launched(evidence(told))
    held = replace(told[1], device=DeviceCalls(answered=False))
    assert not wants_launched(evidence([told[0], held]))
    untold = [replace(one, device=None) for one in told]
    assert wants_launched(evidence(untold))
    assert not wants_launched(evidence([untold[0], replace(untold[1], communicators_settled=False)]))
    on_host = Evidence({"0": GroupInfo("0", (0, 1), "cpu:gloo")}, {0: "n", 1: "n"}, states=told)
    assert not wants_launched(on_host)
    assert locate_by_launched(on_host) is None


def test_kinds_that_are_not_told_of_all_do_not_count() -> None:
    assert differing({0: {"AllReduce": 3, "Reduce": 1}, 1: {"AllReduce": 4, "Reduce": 1}}) == {
        0: {"AllReduce": 3},
        1: {"AllReduce": 4},
    }
    assert differing({0: {"AllReduce": 3}, 1: {}}) == {0: {"AllReduce": 3}}


def test_who_waits_for_a_message_is_not_behind() -> None:
    """Rank 0's host hangs; rank 2 waits for its message, so it has not launched what its peer, rank 3, has."""
    groups = {
        "pp": GroupInfo("pp", (0, 2), "cuda:nccl"),
        "dp0": GroupInfo("dp0", (0, 1), "cuda:nccl"),
        "dp1": GroupInfo("dp1", (2, 3), "cuda:nccl"),
    }
    counts = {0: ("0xa", 8), 1: ("0xa", 9), 2: ("0xb", 8), 3: ("0xb", 9)}
    states = [state(rank, {name: {"AllReduce": count}}, 2) for rank, (name, count) in counts.items()]
    states[0] = replace(states[0], streams=(StreamProgress("pp", int(Op.SEND), 2, 4, 4),))
    states[2] = replace(states[2], streams=(StreamProgress("pp", int(Op.RECV), 0, 5, 5),))
    nodes = dict.fromkeys(range(4), "n")
    found = locate_by_launched(Evidence(groups, nodes, states=states))
    assert found is not None
    assert [one.rank for one in found.culprits] == [0]
