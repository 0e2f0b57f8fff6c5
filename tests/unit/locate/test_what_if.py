from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.effort import many
from tests.unit.locate.synthetic_pipelines import interleaved_step, pipeline_step

from keepstep.core.errors import TraceError
from keepstep.core.traced_operations import Operation
from keepstep.locate import step_graphs, what_if

USUAL = {"forward": 0.1, "backward": 0.2, "grads-sync": 0.05, "params-sync": 0.02}


def job(
    stages: int,
    replicas: int,
    batches: int,
    steps: int = 3,
    *,
    slow: dict[int, float] | None = None,
    seed: int = 0,
):
    chance = random.Random(seed)
    factors = slow or {}
    operations: list[Operation] = []
    times: list[float] = []
    for step in range(steps):

        def lasts(rank: int, kind: str, index: int) -> float:
            noise = 1.0 if kind.endswith("sync") else chance.uniform(0.98, 1.02)
            return USUAL[kind] * noise * (factors.get(rank, 1.0) if kind in ("forward", "backward") else 1.0)

        found, step_s = pipeline_step(step, stages, replicas, batches, lasts, 0.003)
        operations += found
        times.append(step_s)
    return operations, times


@settings(max_examples=many(40), deadline=None)
@given(
    stages=st.integers(1, 5), replicas=st.integers(1, 3), batches=st.integers(1, 9), seed=st.integers(0, 1000)
)
def test_a_replay_with_what_was_measured_is_what_happened(stages, replicas, batches, seed):
    operations, times = job(stages, replicas, batches, seed=seed, slow={0: 1.7})
    random.Random(seed).shuffle(operations)
    (graph,) = step_graphs(operations)
    assert graph.replay(graph.durations).tolist() == pytest.approx(times, rel=1e-9)


def test_nobody_slow_loses_nothing():
    operations, _ = job(4, 2, 8)
    assert what_if(step_graphs(operations)[0]).slowdown < 1.03


@pytest.mark.parametrize("rank", range(8))
def test_a_slow_rank_gives_back_what_it_costs(rank):
    operations, _ = job(4, 2, 8, slow={rank: 2.0})
    found = what_if(step_graphs(operations)[0])
    assert max(found.by_rank, key=lambda one: found.by_rank[one]) == rank
    assert found.by_rank[rank] > 0.8
    assert all(share < 0.1 for other, share in found.by_rank.items() if other != rank)
    assert found.slowdown > 1.3


def test_a_stage_with_more_work_gives_back_only_as_a_whole():
    operations, _ = job(4, 2, 8, slow={6: 2.0, 7: 2.0})
    found = what_if(step_graphs(operations)[0])
    assert found.by_stage[3] > 0.8
    assert max(found.by_rank.values()) < 0.3


def test_steps_of_another_shape_are_apart():
    operations, _ = job(2, 1, 4, steps=3)
    other, _ = pipeline_step(9, 2, 1, 2, lambda rank, kind, index: USUAL[kind], 0.003)
    assert [graph.steps for graph in step_graphs([*operations, *other])] == [(0, 1, 2), (9,)]


@given(batches=st.integers(1, 6), slow=st.floats(1.0, 3.0))
def test_interleaved_stages_replay_as_they_happened(batches, slow):
    found, step_s = interleaved_step(
        0, batches, lambda rank, kind, index: USUAL[kind] * (slow if rank else 1.0), 0.003
    )
    (graph,) = step_graphs(found)
    # Messages are matched by time, so a block that begins within 0.1 ms of another may take its place.
    assert graph.replay(graph.durations).tolist() == pytest.approx([step_s], abs=1e-3)


def test_missing_ranks_leave_the_rest_usable():
    operations, _ = job(4, 2, 8, slow={0: 2.0})
    found = what_if(step_graphs([one for one in operations if one.rank != 5])[0])
    assert found.by_rank[0] > 0.7


def test_no_computation_is_refused():
    with pytest.raises(TraceError, match="no forward or backward"):
        step_graphs([Operation(0, 0, 0, 0, "grads-sync", 0, 0.0, 1.0)])


def test_numbers_that_contradict_the_times_are_refused():
    operations, _ = job(3, 1, 4, steps=1)
    turned = [
        replace(one, index=3 - one.index)
        if one.rank == 1 and one.kind in ("forward", "forward-recv")
        else one
        for one in operations
    ]
    with pytest.raises(TraceError, match="circle"):
        step_graphs(turned)
