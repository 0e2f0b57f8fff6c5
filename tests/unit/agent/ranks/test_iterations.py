"""Iterations of every kind of training loop: as many, as long, and numbered as the script's own clock has them."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.agent import agent_generator as g

from keepstep.agent.ranks.cut import Cut
from keepstep.agent.ranks.iterations import WARM_UP_STEPS, IterationCutter
from keepstep.core.events import Phase


def cut_all(rank: g.Rank, period_ms: float = 50.0) -> tuple[list[Cut], IterationCutter]:
    cutter = IterationCutter()
    cuts: list[Cut] = []
    for started, finished, now in g.polls(rank.table(), period_ms):
        cuts.extend(cutter.feed(started, finished, 0, now))
    return cuts, cutter


LOOPS = {
    "ddp": (2, g.ddp(40)),
    "one process": (1, g.ddp(40)),
    "evaluation every 5": (2, g.ddp(40, evaluate_every=5)),
    "evaluation every 5, not marked": (2, g.ddp(40, evaluate_every=5, marked=False)),
    "checkpoint every 7": (2, g.ddp(40, checkpoint_every=7)),
    "evaluation and checkpoint": (2, g.ddp(40, evaluate_every=5, checkpoint_every=10)),
    "gradient accumulation": (2, g.ddp(40, accumulate=4)),
    "two optimizers in a row": (2, g.ddp(40, optimizers=2)),
    "a log line every 10": (2, g.ddp(60, log_every=10)),
    "optimizer in backward": (2, g.optimizer_in_backward(40)),
    "fsdp2": (2, g.fsdp2(40)),
    "1F1B, first stage": (4, g.pipeline(40, stages=4)),
    "tp2 pp2 dp2": (8, g.pipeline(40, stages=2, tensor=2, data=2)),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("period_ms", [7.0, 50.0, 400.0])
def test_cuts_every_iteration_as_the_script_counts_and_times_it(loop: str, period_ms: float) -> None:
    world, program = LOOPS[loop]
    job = g.Job(world, jitter=0.02).play(program)
    for rank in job.ranks:
        cuts, cutter = cut_all(rank, period_ms)
        assert [cut.step for cut in cuts] == list(range(len(rank.clock)))
        assert cutter.renumbered == 0
        assert all(cut.whole for cut in cuts)
        assert [cut.warm_up for cut in cuts] == [step < WARM_UP_STEPS for step in range(len(cuts))]
        for cut in cuts[1:]:
            assert cut.duration_ns / 1e9 == pytest.approx(
                rank.clock[cut.step], rel=0.02 if "not marked" in loop else 0.005
            )


def test_an_incarnation_counts_on_from_the_step_that_it_went_on_from() -> None:
    rank = g.Job(2).play(g.ddp(20, optimizers=2)).ranks[0]
    cuts, plain = cut_all(rank)
    cutter = IterationCutter()
    cutter.first_step = 1000
    later = [
        cut
        for started, finished, now in g.polls(rank.table(), 50.0)
        for cut in cutter.feed(started, finished, 0, now)
    ]
    assert [cut.step for cut in later] == [1000 + cut.step for cut in cuts]
    assert [cut.warm_up for cut in later] == [cut.warm_up for cut in cuts]
    assert cutter.step == 1000 + plain.step
    assert cutter.steps_at_end_of(1010) == plain.steps_at_end_of(10) == 22


def test_pauses_are_told_apart_and_their_communication_left_out() -> None:
    rank = g.Job(2).play(g.ddp(20, evaluate_every=5, checkpoint_every=10)).ranks[0]
    cuts, _ = cut_all(rank)
    at_ten = cuts[10]
    assert at_ten.evaluation_ns / 1e9 == pytest.approx(0.302, abs=0.001)
    assert at_ten.checkpoint_ns / 1e9 == pytest.approx(0.702, abs=0.001)
    assert cuts[11].evaluation_ns == cuts[11].checkpoint_ns == 0
    assert not set(at_ten.rows["bytes"].tolist()) & {8, 77}


@pytest.mark.parametrize(("critics", "per_step"), [(1, 2), (5, 6)])
def test_a_gan_has_several_optimizer_steps_per_iteration(critics: int, per_step: int) -> None:
    rank = g.Job(2).play(g.gan(60, critics=critics)).ranks[1]
    cuts, cutter = cut_all(rank)
    assert cutter.renumbered == 1
    settled = cuts[-30:]
    assert [cut.step for cut in settled] == list(range(30, 60))
    for cut in settled:
        assert cut.duration_ns / 1e9 == pytest.approx(rank.clock[cut.step], rel=0.005)
        assert np.count_nonzero(cut.rows["op"][cut.rows["kind"] == g.PHASE] == g.OPTIMIZER) == per_step


@pytest.mark.parametrize("number", [0, 5])
def test_a_loop_without_optimizer_is_cut_by_its_communication(number: int) -> None:
    job = g.Job(8).play(g.pipeline(60, stages=2, tensor=2, data=2, bare=True))
    cuts, _ = cut_all(job.ranks[number])
    steps = [cut.step for cut in cuts]
    assert steps[0] <= 2
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert steps[-1] >= 58
    for cut in cuts:
        if cut.step < 59:
            assert cut.duration_ns / 1e9 == pytest.approx(job.ranks[number].clock[cut.step], rel=0.005)


def test_the_first_optimizer_step_ends_cutting_by_communication() -> None:
    job = g.Job(4).play(g.pipeline(60, stages=4, bare=True))
    rank = job.ranks[1]
    rank.phase(g.OPTIMIZER, 5)
    for _ in range(10):
        rank.phase(g.BACKWARD, 100)
        rank.phase(g.OPTIMIZER, 5)
    cuts, cutter = cut_all(rank)
    assert cutter.renumbered == 1
    assert [cut.step for cut in cuts][-10:] == list(range(1, 11))


def test_an_iteration_is_told_within_one_poll_once_their_number_per_step_is_known() -> None:
    rank = g.Job(2).play(g.ddp(30)).ranks[0]
    cutter = IterationCutter()
    for started, finished, now in g.polls(rank.table(), 10.0):
        for cut in cutter.feed(started, finished, 0, now):
            assert now - cut.end_ns <= (10 if cut.step > 10 else 61) * g.MS


def test_lost_records_cost_only_the_iterations_they_were_in() -> None:
    rank = g.Job(2).play(g.ddp(40)).ranks[0]
    rows = rank.table()
    steps = np.flatnonzero((rows["kind"] == g.PHASE) & (rows["op"] == g.OPTIMIZER))
    hole = slice(steps[19] - 3, steps[21] + 2)  # swallows the ends of steps 19, 20 and 21
    rest = np.delete(rows, np.arange(hole.start, hole.stop))
    cutter = IterationCutter()
    cuts: list[Cut] = []
    for started, finished, now in g.polls(rest):
        inside = len(started) and started["ticket"].max() >= hole.stop > started["ticket"].min()
        cuts.extend(cutter.feed(started, finished, hole.stop - hole.start if inside else 0, now))
    steps_told = [cut.step for cut in cuts]
    assert steps_told == [step for step in range(40) if step not in (19, 20, 21, 22)]
    for cut in cuts[1:]:
        assert cut.duration_ns / 1e9 == pytest.approx(rank.clock[cut.step], rel=0.005)


def test_an_agent_that_comes_later_gives_steps_the_same_numbers() -> None:
    rank = g.Job(2).play(g.ddp(60, optimizers=2, evaluate_every=5)).ranks[0]
    rows = rank.table()
    first, _ = cut_all(rank)
    late = rows[len(rows) // 3 :]
    cutter = IterationCutter()
    now = int(rows["start_ns"][len(rows) * 2 // 3])
    past = late[late["start_ns"] <= now].copy()
    cuts = cutter.feed(past, past[(past["end_ns"] > 0) & (past["end_ns"] <= now)], 999, now)
    for started, finished, later in g.polls(late[late["start_ns"] > now]):
        cuts.extend(cutter.feed(started, finished, 0, later))
    ends = {cut.end_ns: cut.step for cut in first}
    assert len(cuts) > 35
    assert all(ends[cut.end_ns] == cut.step for cut in cuts)
    assert cuts[-1].step == 59


def test_phases_are_followed() -> None:
    rank = g.Job(1).ranks[0]
    cutter = IterationCutter()
    empty = np.zeros(0, g.RECORD)
    assert cutter.phase()[0] == Phase.STARTUP
    rank.phase(g.OPTIMIZER, 5)
    rows = rank.table()
    cutter.feed(rows, rows, 0, rank.now + 60 * g.MS)
    assert cutter.phase() == (Phase.FORWARD, int(rows["end_ns"][0]))
    rank.begin(g.BACKWARD)
    cutter.feed(rank.table()[1:], empty, 0, rank.now)
    assert cutter.phase() == (Phase.BACKWARD, int(rank.table()["start_ns"][1]))


def test_outside_of_every_phase_the_one_that_ended_last_tells_where_a_rank_is() -> None:
    rank = g.Job(1).ranks[0]
    cutter = IterationCutter()
    empty = np.zeros(0, g.RECORD)
    assert cutter.evident_phase()[0] == Phase.STARTUP
    seen: list[int] = []
    for phase in (g.OPTIMIZER, g.GC, g.DATA, g.BACKWARD, g.OPTIMIZER, g.CHECKPOINT, g.EVALUATION):
        before = len(rank.rows)
        rank.phase(phase, 5)
        rows = rank.table()[before:]
        cutter.feed(rows, rows, 0, rank.now + 60 * g.MS)
        code, since_ns = cutter.evident_phase()
        assert since_ns == int(rows["end_ns"][0])
        seen.append(code)
    after, forward = Phase.AFTER_STEP, Phase.FORWARD
    assert seen == [after, after, forward, Phase.AFTER_BACKWARD, after, after, after]
    rank.begin(g.BACKWARD)
    cutter.feed(rank.table()[-1:], empty, 0, rank.now)
    assert cutter.evident_phase()[0] == Phase.BACKWARD


def test_an_asynchronous_checkpoint_of_another_thread_is_no_pause() -> None:
    rank = g.Job(1).ranks[0]
    for _ in range(10):
        row = rank.begin(g.CHECKPOINT)
        row["thread"] = 8
        rank.compute(50)
        rank.end(row)
        rank.phase(g.BACKWARD, 20)
        rank.phase(g.OPTIMIZER, 5)
    cuts, _ = cut_all(rank)
    assert all(cut.checkpoint_ns == 0 for cut in cuts)
    assert cuts[-1].duration_ns / 1e9 == pytest.approx(0.075, rel=0.01)


@pytest.mark.parametrize("stages", [4, 1])
def test_the_micro_batch_of_the_open_pass_is_known(stages: int) -> None:
    """Held against the table: how many passes of the kind began since the last optimizer step ended."""
    passes = stages > 1
    program = g.pipeline(12, stages=stages) if passes else g.ddp(12)
    table = g.Job(max(stages, 2)).play(program).ranks[0].table()
    cutter = IterationCutter()
    seen: set[int] = set()
    for started, finished, now in g.polls(table, 3.0):
        cutter.feed(started, finished, 0, now)
        if cutter.step < 5:
            continue
        code, since_ns = cutter.phase()
        number = cutter.microbatch()
        if not passes or code != Phase.BACKWARD:
            assert number == -1 or code == Phase.MODEL
            continue
        phases = table[table["kind"] == g.PHASE]
        steps = phases[(phases["op"] == g.OPTIMIZER) & (phases["end_ns"] <= since_ns)]
        begun = phases[(phases["op"] == Phase.BACKWARD) & (phases["start_ns"] >= steps["end_ns"].max())]
        assert number == np.count_nonzero(begun["start_ns"] <= since_ns) - 1
        seen.add(number)
    assert len(seen) > 1 if passes else not seen


def test_a_rank_that_winds_up_is_in_its_teardown_whatever_else_it_is_in() -> None:
    rank = g.Job(1).ranks[0]
    cutter = IterationCutter()
    empty = np.zeros(0, g.RECORD)
    rank.phase(g.OPTIMIZER, 5)
    cutter.feed(rank.table(), rank.table(), 0, rank.now + 60 * g.MS)
    seen: list[int] = []
    for phase in (Phase.TEARDOWN, g.GC, g.CHECKPOINT, g.BACKWARD):
        rank.begin(int(phase))
        cutter.feed(rank.table()[-1:], empty, 0, rank.now)
        seen.append(cutter.evident_phase()[0])
    # A thread may train on when the script's main thread is over.
    assert seen == [Phase.TEARDOWN, Phase.TEARDOWN, Phase.TEARDOWN, Phase.BACKWARD]


def test_a_rank_that_sets_up_its_groups_again_does_not_wind_up() -> None:
    rank = g.Job(1).ranks[0]
    cutter = IterationCutter()
    empty = np.zeros(0, g.RECORD)
    rank.phase(g.OPTIMIZER, 5)
    cutter.feed(rank.table(), rank.table(), 0, rank.now + 60 * g.MS)
    row = rank.begin(int(Phase.TEARDOWN))
    cutter.feed(rank.table()[-1:], empty, 0, rank.now)
    assert cutter.phase()[0] == Phase.TEARDOWN
    rank.end(row)
    cutter.feed(empty, rank.table()[-1:], 0, rank.now)
    assert cutter.phase()[0] == Phase.FORWARD


def test_a_phase_of_a_number_that_nobody_knows_is_like_none() -> None:
    rank = g.Job(1).play(g.ddp(8)).ranks[0]
    row = rank.begin(99)
    rank.compute(5.0)
    _, cutter = cut_all(rank)
    assert row["end_ns"] == 0
    assert cutter.phase()[0] == Phase.FORWARD
