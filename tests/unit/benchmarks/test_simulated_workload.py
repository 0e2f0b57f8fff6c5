from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.simulate import SCHEDULES, BlockTimes, Durations, Fault, Workload

from keepstep.agent.ranks.event_buffer import Rows
from keepstep.agent.ranks.states import rank_state
from keepstep.agent.ranks.track import RankTrack
from keepstep.core.errors import UsageError
from keepstep.core.events import Kind, Op, Phase
from keepstep.core.layout import ParallelLayout
from keepstep.core.summary import IterationSummary, RankState
from keepstep.ring import STREAM

EXACT = Durations(message_s=0.0, tp_s=0.0)
ENDS_S = 0.002 + 0.010 + 0.020 + 0.0005  # data, optimizer, gradients, norm
BLOCKS_S = 0.040 + 0.080


def exact(pp: int, dp: int = 2, tp: int = 1, **options) -> Workload:
    return Workload(ParallelLayout(tp=tp, pp=pp, dp=dp), durations=EXACT, jitter=0.0, **options)


@pytest.mark.parametrize(("pp", "batches"), [(1, 4), (2, 4), (4, 8), (4, 3), (8, 16)])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_healthy_step_takes_what_the_pipeline_must(pp, batches, tp, schedule):
    run = exact(pp, tp=tp, micro_batches=batches, schedule=schedule).run(3)
    assert run.iteration_s == pytest.approx((batches + pp - 1) * BLOCKS_S + ENDS_S)


def test_interleaving_halves_the_bubble_and_zero_bubble_fills_it():
    times = {s: float(exact(4, micro_batches=8, schedule=s).run(1).iteration_s[0]) for s in SCHEDULES}
    assert times["interleaved"] == pytest.approx((8 + 3 / 2) * BLOCKS_S + ENDS_S)
    assert 8 * BLOCKS_S + ENDS_S < times["zero-bubble"] < times["interleaved"] < times["1f1b"]


@pytest.mark.parametrize("stage", range(4))
def test_the_critical_path_goes_through_a_slow_stage(stage):
    slow = [Fault("compute", rank, factor=2.0, first_step=1) for rank in (2 * stage, 2 * stage + 1)]
    healthy, later = exact(4, micro_batches=8).run(2, slow).iteration_s
    before_s = stage * BLOCKS_S
    first_backward_s = (3 - stage) * (BLOCKS_S - 2 * 0.040)  # comes after the warm-up's forwards are done
    blocks_s = before_s + first_backward_s + 8 * 2 * BLOCKS_S
    assert later == pytest.approx(blocks_s + ENDS_S, abs=0.0021)  # its data takes twice as long, too
    assert healthy == pytest.approx(11 * BLOCKS_S + ENDS_S)


def test_a_delay_is_absorbed_where_there_is_slack_and_felt_where_there_is_none():
    workload = exact(4, micro_batches=8)
    first_of_last_stage = Fault("forward", 6, micro_batch=0, delay_s=0.1)
    last_of_first_stage = Fault("forward", 0, micro_batch=3, delay_s=0.03)
    healthy = workload.run(1).iteration_s
    assert workload.run(1, [first_of_last_stage]).iteration_s == pytest.approx(healthy + 0.1)
    assert workload.run(1, [last_of_first_stage]).iteration_s == pytest.approx(healthy)


def test_a_slow_message_a_slow_group_and_a_slow_link_take_their_time():
    workload = exact(2, dp=8, tp=2, micro_batches=4)
    healthy = workload.run(1).iteration_s
    for fault in (
        Fault("message", 0, peer=16, micro_batch=0, delay_s=0.5),
        Fault("tp", 3, micro_batch=0, delay_s=0.5),
        Fault("dp", 4, delay_s=0.5),
    ):
        assert workload.run(1, [fault]).iteration_s == pytest.approx(healthy + 0.5)
    link = Fault("link", 0, peer=8, delay_s=0.5)  # neighbours in the gradients' rings
    assert workload.run(1, [link]).iteration_s == pytest.approx(healthy + 0.5)


@pytest.mark.parametrize("stages", [2, 4])
def test_a_replica_with_fewer_micro_batches_does_what_it_would_with_so_many(stages):
    shares = [9, 5, 10]
    run = exact(stages, dp=3, tp=2).run(2, shares=shares, first_step=7)
    rows = [rank[1] for rank in run.summaries()]
    for replica, share in enumerate(shares):
        alone = [rank[1] for rank in exact(stages, dp=3, tp=2, micro_batches=share).run(2).summaries()]
        for rank in range(replica * 2, len(rows), 6):
            assert rows[rank].step == 8
            assert rows[rank].self_s == pytest.approx(alone[rank].self_s)
            for one, other in zip(rows[rank].streams, alone[rank].streams, strict=True):
                assert (one.count, one.bytes) == (other.count, other.bytes)
                if not one.group.startswith(("dp", "world")):
                    assert one.fastest_s == pytest.approx(other.fastest_s)
                    assert one.blocked_s == pytest.approx(other.blocked_s)
    longest = exact(stages, dp=3, tp=2, micro_batches=10).run(2)
    assert run.iteration_s == pytest.approx(longest.iteration_s)


def test_recorded_blocks_are_used_as_they_are():
    steps = np.full((3, 2, 2, 4), 0.04)
    steps[1] *= 2
    workload = exact(2, micro_batches=4, recorded=BlockTimes(steps, 2 * steps))
    times = workload.run(4).iteration_s - ENDS_S
    assert times == pytest.approx([5 * BLOCKS_S, 10 * BLOCKS_S, 5 * BLOCKS_S, 5 * BLOCKS_S])


def test_the_same_seed_gives_the_same_job_with_and_without_a_fault():
    workload = Workload(ParallelLayout(pp=2, dp=2), seed=3)
    assert (workload.run(4).iteration_s == workload.run(4).iteration_s).all()
    hit = workload.run(4, [Fault("forward", 1, micro_batch=0, delay_s=1.0, first_step=2)]).iteration_s
    assert (hit[:2] == workload.run(4).iteration_s[:2]).all()
    assert (
        workload.run(4).iteration_s != Workload(ParallelLayout(pp=2, dp=2), seed=4).run(4).iteration_s
    ).all()


def test_what_cannot_be_simulated_is_refused():
    with pytest.raises(UsageError, match="tp, dp and pp"):
        Workload(ParallelLayout(cp=2, dp=2))
    with pytest.raises(UsageError, match="131072"):
        Workload(ParallelLayout(dp=1 << 18))
    with pytest.raises(UsageError, match="multiple of 4"):
        exact(4, micro_batches=6, schedule="interleaved").run(1)
    with pytest.raises(UsageError, match="stuck=True"):
        exact(2).run(1, [Fault("forward", 0, delay_s=math.inf)])
    with pytest.raises(UsageError, match="1F1B"):
        exact(2, dp=2).run(1, shares=[4])
    with pytest.raises(UsageError, match="too many"):
        exact(2, dp=1024).run(1, log=True)


# --- where everybody is in a hang -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["forward", "backward", "data", "optimizer"])
def test_in_a_hang_only_the_culprit_waits_for_nobody(where):
    workload = Workload(ParallelLayout(tp=2, pp=2, dp=2), micro_batches=4)
    batch = 2 if where in ("forward", "backward") else -1
    fault = Fault(where, 5, micro_batch=batch, delay_s=math.inf, first_step=1, last_step=1)
    states = list(workload.run(3, [fault], stuck=True).states())
    waiting = {state.rank for state in states if any(f.op != Op.SEND for f in state.in_flight)}
    assert waiting == set(range(8)) - {5}
    phases = {
        "forward": Phase.MODEL,
        "backward": Phase.BACKWARD,
        "data": Phase.DATA,
        "optimizer": Phase.OPTIMIZER,
    }
    assert states[5].phase == phases[where]
    assert states[5].step == 0
    for state in states:
        assert all(0 <= one.started - one.completed <= 1 for one in state.streams)
        assert len(state.in_flight) == sum(one.started - one.completed for one in state.streams)
        assert state.last_progress_s <= state.now_s


def test_a_rank_that_skips_waits_elsewhere_and_the_dead_are_gone():
    workload = Workload(ParallelLayout(tp=2, pp=2, dp=2), micro_batches=4)
    states = list(workload.run(2, [Fault("dp", 5, skips=True, first_step=1)], stuck=True).states())
    assert [one.group for one in states[5].in_flight] == ["world"]
    assert [one.group for one in states[7].in_flight] == ["dp_3"]
    dead = Fault("backward", 2, micro_batch=1, delay_s=math.inf, dies=True)
    assert [s.rank for s in workload.run(1, [dead], stuck=True).states() if not s.alive] == [2]


# --- the shortcuts for large jobs are what the agents make of the records ---------------------------------------------


def polled(rows: Rows) -> list[tuple[Rows, Rows, int]]:
    """As an agent reads a ring, ten times a second."""
    last = int(max(rows["start_ns"].max(), rows["end_ns"].max()))
    before, found = int(rows["start_ns"].min()) - 1, []
    while before < last:
        now = before + 100_000_000
        started = rows[(rows["start_ns"] > before) & (rows["start_ns"] <= now)].copy()
        started["end_ns"][started["end_ns"] > now] = 0
        started["wait_ns"][started["wait_ns"] > now] = 0
        finished = rows[(rows["end_ns"] > before) & (rows["end_ns"] <= now)]
        found.append((started, finished, now))
        before = now
    return [*found, (rows[:0], rows[:0], now + 1_000_000_000)]


def watched(workload: Workload, rank: int, rows: Rows) -> tuple[RankTrack, list[IterationSummary]]:
    track = RankTrack(rank, "gpu", [rank])
    taken = []
    for started, finished, now_ns in polled(rows):
        found = track.take(started, finished, 0, now_ns, lambda: workload.groups_of(rank)).iterations
        taken += [one for one, _ in found]
    return track, taken


def stream_table(rows: Rows) -> np.ndarray:
    """The ring's table of streams."""
    found = {}
    for row in rows[rows["kind"] != Kind.PHASE]:
        op = row["op"] if row["kind"] == Kind.P2P else 0
        new = [0, 0, 0, 0, row["peer"], row["group"], row["kind"], 0]
        entry = found.setdefault((row["group"], op, row["peer"]), new)
        entry[0] += 1
        entry[1] += row["end_ns"] > 0
        entry[7] = row["op"]
    return np.array([tuple(entry) for entry in found.values()], STREAM)


def flat(one: IterationSummary) -> list:
    return [
        (one.rank, one.step), *((s.group, s.op, s.peer, s.count, s.bytes, s.first_seq) for s in one.streams)
    ]  # fmt: skip


def times(one: IterationSummary) -> list[float]:
    found = [getattr(one, name) for name in one.__slots__ if name.endswith("_s")]
    return found + [getattr(s, name) for s in one.streams for name in s.__slots__ if name.endswith("_s")]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(pp=2, dp=2),
        ParallelLayout(tp=2, pp=4, dp=2),
        ParallelLayout(dp=3),
        ParallelLayout(tp=2),
    ],
)
def test_summaries_are_what_the_agents_make_of_the_records(layout, schedule):
    if layout.pp == 1 and schedule == "interleaved":
        pytest.skip("no pipeline")
    workload = Workload(layout, schedule, micro_batches=4, ranks_per_node=2)
    faults = [
        Fault("backward", 1, micro_batch=2, delay_s=0.3, first_step=4),
        Fault("message", 0, peer=2, delay_s=0.2),
    ]
    run = workload.run(7, faults, log=True)
    for rank, told in enumerate(run.summaries()):
        _, taken = watched(workload, rank, run.records(rank))
        assert [one.step for one in taken] == list(range(7))
        for agents, ours in zip(taken, told, strict=True):
            assert flat(agents) == flat(ours)
            assert times(agents) == pytest.approx(times(ours), abs=2e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tp", [1, 2])
def test_blocks_are_what_the_agents_make_of_the_records(schedule, tp):
    workload = Workload(ParallelLayout(tp=tp, pp=4, dp=2), schedule, micro_batches=4, ranks_per_node=2)
    ranks = (0, 1, 3 * tp, 8 * tp - 1)
    fault = Fault("message", 0, peer=2 * tp, delay_s=0.2)
    run = workload.run(3, [fault], log=True, blocks_of=ranks)
    told = list(run.blocks())
    for rank in ranks:
        track = RankTrack(rank, "gpu", [rank])
        for started, finished, now_ns in polled(run.records(rank)):
            track.take(started, finished, 0, now_ns, lambda: workload.groups_of(rank))  # noqa: B023
        agents = track.blocks(0, 2)
        ours = [one for one in told if one.rank == rank]

        def key(one):
            return one.step, one.kind, one.peer, one.index

        agents.sort(key=key)
        ours.sort(key=key)
        assert [key(one) for one in agents] == [key(one) for one in ours]
        for one, other in zip(agents, ours, strict=True):
            assert (one.start_s, one.duration_s) == pytest.approx((other.start_s, other.duration_s), abs=2e-6)
            assert one.own_s == pytest.approx(other.own_s, abs=5e-6)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("forward", 3, micro_batch=1, delay_s=math.inf, first_step=2),
        Fault("backward", 4, micro_batch=3, delay_s=math.inf, first_step=2),
        Fault("optimizer", 6, delay_s=math.inf, first_step=1),
        Fault("message", 1, peer=5, micro_batch=2, delay_s=math.inf, first_step=2),
        Fault("dp", 2, delay_s=math.inf, first_step=2),
        Fault("tp", 5, skips=True, first_step=2),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
def test_states_are_what_the_agents_make_of_the_records(fault, schedule):
    workload = Workload(ParallelLayout(tp=2, pp=2, dp=2), schedule, micro_batches=4, ranks_per_node=2)
    run = workload.run(3, [fault], log=True, stuck=True)
    for rank, ours in enumerate(run.states()):
        rows = run.records(rank)
        track, _ = watched(workload, rank, rows)
        agents = rank_state(
            track, rows[rows["end_ns"] == 0], stream_table(rows), "S", round(ours.now_s * 1e9)
        )
        assert seen(agents) == seen(ours)
        assert since(agents) == pytest.approx(since(ours), abs=2e-6)


def seen(state: RankState) -> list:
    flights = [(one.group, one.op, one.peer, one.seq, one.waits) for one in state.in_flight]
    return [
        state.rank,
        state.alive,
        state.step,
        state.phase,
        state.progress,
        flights,
        sorted(map(repr, state.streams)),
    ]


def since(state: RankState) -> list[float]:
    return [state.phase_since_s, state.last_progress_s, *(one.since_s for one in state.in_flight)]


def test_every_node_has_its_own_clock():
    workload = Workload(ParallelLayout(dp=4), ranks_per_node=2)
    starts = [rows[0].start_s for rows in workload.run(1).summaries()]
    assert abs(starts[0] - starts[1]) < 1.0 < abs(starts[0] - starts[2])
