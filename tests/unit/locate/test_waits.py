"""Whether anybody was seen to wait, and that nobody is blamed for sure where none was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Culprit, Diagnosis
from keepstep.core.summary import (
    GroupInfo,
    IterationSummary,
    OpInFlight,
    RankState,
    StreamProgress,
    StreamSummary,
)
from keepstep.locate import hidden_waits, waits_recorded, waits_seen

GLOO = GroupInfo("dp", (0, 1), "cpu:gloo")
NCCL = GroupInfo("dp", (0, 1), "cuda:nccl")
BOTH = GroupInfo("world", (0, 1), "cpu:gloo,cuda:nccl")


def rows(blocked_s: float = 0.2, *groups: str) -> list[IterationSummary]:
    streams = tuple(
        StreamSummary(group, Op.ALLREDUCE, -1, 1, 4096, 0, 0.1, 0.3, 0.2, blocked_s, 0.2)
        for group in groups or ("dp",)
    )
    return [
        IterationSummary(rank, step, 0.0, 1.0, 1.0 - blocked_s, blocked_s, streams=streams)
        for rank in range(2)
        for step in range(3)
    ]


@pytest.mark.parametrize(
    ("backend", "recorded"),
    [
        ("", True),  # a trace that does not say
        ("gloo", True),
        ("cpu:gloo", True),
        ("nccl", False),
        ("cuda:nccl", False),
        ("cuda:nccl2", False),
        ("hpu:hccl", False),
        ("cpu:gloo,cuda:nccl", False),
    ],
)
def test_which_groups_show_how_long_their_ranks_waited(backend: str, recorded: bool) -> None:
    assert GroupInfo("dp", (0, 1), backend).records_waits is recorded


def test_waits_are_recorded_on_host_backends() -> None:
    assert waits_recorded(Evidence({"dp": GLOO}, {}, after=rows()))
    assert waits_recorded(Evidence({}, {}, after=rows()))  # a group that nobody has told of yet


def test_none_are_recorded_where_operations_run_on_a_device() -> None:
    assert not waits_recorded(Evidence({"dp": NCCL}, {}, after=rows()))
    assert not waits_recorded(Evidence({"log": GLOO, "dp": NCCL}, {}, after=rows(0.2, "log", "dp")))
    assert not waits_recorded(Evidence({"world": BOTH}, {}, after=rows(0.2, "world")))
    assert waits_recorded(Evidence({"dp": GLOO, "unused": NCCL}, {}, after=rows()))


def test_none_are_recorded_where_no_rank_ever_waited() -> None:
    assert not waits_recorded(Evidence({"dp": GLOO}, {}, after=rows(0.0)))
    assert not waits_recorded(Evidence({"dp": GLOO}, {}, after=[]))


def state(rank: int, *groups: str, alive: bool = True) -> RankState:
    flying = tuple(OpInFlight(group, Op.ALLREDUCE, -1, 7, 0.0) for group in groups)
    return RankState(rank, alive, 3, 1, 0.0, 10, 0.0, 9.0, flying)


def test_a_rank_is_seen_to_wait_where_it_is_in_an_operation_whose_end_is_recorded() -> None:
    groups = {"dp": NCCL, "log": GLOO}
    assert not waits_seen(Evidence(groups, {}, states=[state(0), state(1, "dp")]))
    assert waits_seen(Evidence(groups, {}, states=[state(0), state(1, "dp", "log")]))
    assert not waits_seen(Evidence(groups, {}, states=[state(0), state(1, "log", alive=False)]))


def test_a_rank_that_has_begun_an_operation_whose_end_is_not_recorded_may_wait_unseen() -> None:
    groups = {"dp": NCCL, "log": GLOO}
    began = replace(state(1), streams=(StreamProgress("dp", Op.ALLREDUCE, -1, 4, 4),))
    logs = replace(state(2), streams=(StreamProgress("log", Op.ALLREDUCE, -1, 4, 3),))
    assert hidden_waits(Evidence(groups, {}, states=[state(0), began, logs])) == {1}


def test_doubt_leaves_nobody_blamed_for_sure_but_those_apart() -> None:
    blamed = tuple(Culprit(rank, confidence=sure) for rank, sure in enumerate(("high", "medium", "low")))  # type: ignore[arg-type]
    diagnosis = Diagnosis("hang", blamed, (), (), ("one thing",))
    doubted = diagnosis.doubted("waits", [0])
    assert [one.confidence for one in doubted.culprits] == ["high", "low", "low"]
    assert doubted.missing == ("one thing", "waits")
    unsure = replace(diagnosis, culprits=blamed[2:])
    assert unsure.doubted("waits") is unsure
