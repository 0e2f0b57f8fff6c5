"""Slow ranks of pipelines whose waits are not recorded, by what their hosts did from call to call."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from keepstep.core.events import Op
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Diagnosis
from keepstep.core.summary import GroupInfo, IterationSummary, StreamSummary
from keepstep.locate import locate_slow

ONSET, STEPS = 10, 15
TENSOR = 4
RANKS = range(8)  # TP4·PP2
BIG = 1 << 24
LOST_S = 1.0


def group(name: str, *members: int) -> GroupInfo:
    return GroupInfo(name, members, "cuda:nccl")


GROUPS = [
    group("world", *RANKS),
    *(group(f"tp{stage}", *range(TENSOR * stage, TENSOR * stage + TENSOR)) for stage in (0, 1)),
]


def job(
    own: Mapping[int, float],
    waits: Mapping[int, float],
    *,
    late: Mapping[int, float] = {},
    shared: Mapping[int, Collection[str]] | None = None,
    slowdown_s: float = LOST_S,
) -> list[IterationSummary]:
    """Iterations that grow at ``ONSET``: those times between calls, after receives, and of small collectives.

    ``shared``: each rank's groups of larger collectives.
    """
    found: list[IterationSummary] = []
    for step in range(STEPS):
        grown = float(step >= ONSET)
        duration_s = 1.0 + grown * slowdown_s
        for rank in RANKS:
            names = {f"tp{rank // TENSOR}"} if shared is None else shared[rank]
            at_s = 0.9 + grown * late.get(rank, 0.0)
            streams = [stream("world", 4, at_s), *(stream(name, BIG, 0.1) for name in names)]
            found.append(
                IterationSummary(
                    *(rank, step, float(step), duration_s, duration_s, 0.001),
                    between_calls_s=0.5 + grown * own.get(rank, 0.0),
                    after_receives_s=0.3 + grown * waits.get(rank, 0.0),
                    streams=tuple(streams),
                )
            )
    return found


def stream(name: str, nbytes: int, at_s: float) -> StreamSummary:
    return StreamSummary(name, int(Op.ALLREDUCE), -1, 4, 4 * nbytes, 1, at_s, at_s, 0.0, 0.0, 0.0)


def judged(rows: list[IterationSummary], **known: Any) -> Diagnosis:
    before = [row for row in rows if row.step < ONSET]
    after = [row for row in rows if row.step >= ONSET]
    given = {"groups": {one.name: one for one in GROUPS}, "nodes": dict.fromkeys(RANKS, "a")}
    return locate_slow(Evidence(before=before, after=after, onset_step=ONSET, **(given | known)))


def blamed(diagnosis: Diagnosis) -> list[int | None]:
    return [one.rank for one in diagnosis.culprits]


SLOW = dict.fromkeys(range(4, 8), 0.9)
VICTIMS = dict.fromkeys(range(4), 0.8)
OTHERS = {rank: 0.8 for rank in RANKS if rank != 5}
LATE = {5: 0.05}


def test_the_last_of_the_ranks_with_longer_own_time_is_named() -> None:
    diagnosis = judged(job(SLOW, VICTIMS, late=LATE))
    assert (blamed(diagnosis), diagnosis.victims) == ([5], (0, 1, 2, 3, 4, 6, 7))
    assert diagnosis.culprits[0].confidence == "medium"
    assert "ranks 4-7: 0.5 -> 1.4 s between calls" in diagnosis.evidence[0]


def test_without_tensor_parallel_peers_the_rank_stands_alone() -> None:
    alone = dict.fromkeys(RANKS, ())
    diagnosis = judged(job({5: 0.9}, OTHERS, shared=alone))
    assert blamed(diagnosis) == [5]


@pytest.mark.parametrize(
    ("why", "rows"),
    [
        (
            "the last stage reads its loss, and the others run ahead of their GPUs",
            job(SLOW, {}, late=LATE),
        ),
        ("one victim is not seen to wait", job(SLOW, {0: 0.8, 1: 0.8, 2: 0.8}, late=LATE)),
        ("all grow alike", job(dict.fromkeys(RANKS, 0.9), {}, late=LATE)),
        ("another rank grew by half as much", job({**SLOW, 0: 0.5}, VICTIMS, late=LATE)),
        ("the slow ones wait longer for messages, too", job(SLOW, {**VICTIMS, 4: 0.5, 5: 0.5}, late=LATE)),
        ("the growth explains little", job(dict.fromkeys(range(4, 8), 0.2), VICTIMS, late=LATE)),
        ("one of four in each other's kernels", job({5: 0.9}, OTHERS, late=LATE)),
        (
            "it may wait for its replica after their gradients' all-reduce",
            job({5: 0.9}, OTHERS, shared=dict.fromkeys(RANKS, ("world",))),
        ),
        ("a group that is not known", job(SLOW, VICTIMS, late=LATE, shared=dict.fromkeys(RANKS, ("?",)))),
        ("none of them comes last", job(SLOW, VICTIMS)),
        ("two come late", job(SLOW, VICTIMS, late={5: 0.05, 6: 0.04})),
        ("by chance", job(SLOW, VICTIMS, late={5: 0.005})),
    ],
)  # fmt: skip
def test_nobody_is_named_where_a_host_may_wait_unseen(why: str, rows: list[IterationSummary]) -> None:
    assert blamed(judged(rows)) == [], why


def test_those_that_cannot_be_told_apart_are_told() -> None:
    assert judged(job(SLOW, VICTIMS)).evidence[1] == "which of these is slow does not show"


def test_nobody_is_named_while_a_rank_is_silent() -> None:
    rows = [row for row in job(SLOW, VICTIMS, late=LATE) if row.rank]
    assert blamed(judged(rows)) == []


def test_nobody_is_named_where_calls_are_not_known() -> None:
    rows = job(SLOW, VICTIMS, late=LATE)
    assert (
        blamed(judged([replace(row, between_calls_s=-1.0) if row.rank == 0 else row for row in rows])) == []
    )
    assert blamed(judged([replace(row, between_calls_s=float("nan")) for row in rows])) == []


def test_ranks_of_nodes_whose_clocks_are_not_known_are_not_told_apart() -> None:
    assert blamed(judged(job(SLOW, VICTIMS, late=LATE), nodes=dict.fromkeys(RANKS, "a") | {7: "b"})) == []
