"""Short iterations that are cut together come apart again as if each had been cut singly, and cost one summary."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.agent import agent_generator as g

from keepstep.agent.ranks import iterations
from keepstep.agent.ranks.cut import Cut
from keepstep.agent.ranks.iterations import LONGEST_TOGETHER_NS, IterationCutter
from keepstep.agent.ranks.summarise import summarise
from keepstep.agent.ranks.track import RankTrack
from keepstep.core.finding import Finding


@pytest.fixture(autouse=True)
def long_ones_count_as_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iterations, "_SHORT_NS", 1_000_000_000)


LOOPS = {
    "ddp": (2, g.ddp(60)),
    "evaluation every 20": (2, g.ddp(80, evaluate_every=20)),
    "evaluation every 20, not marked": (2, g.ddp(80, evaluate_every=20, marked=False)),
    "checkpoint every 7": (2, g.ddp(60, checkpoint_every=7)),
    "gradient accumulation": (2, g.ddp(60, accumulate=4)),
    "two optimizers in a row": (2, g.ddp(60, optimizers=2)),
    "a GAN": (2, g.gan(120, critics=2)),
    "a log line every 10": (2, g.ddp(60, log_every=10)),
    "optimizer in backward": (2, g.optimizer_in_backward(60)),
    "tp2 pp2 dp2": (8, g.pipeline(60, stages=2, tensor=2, data=2)),
    "no optimizer": (4, g.pipeline(60, stages=4, bare=True)),
}


def cut_all(rank: g.Rank, together: int, period_ms: float) -> list[Cut]:
    cutter = IterationCutter()
    cuts: list[Cut] = []
    for started, finished, now in g.polls(rank.table(), period_ms):
        cutter.together = together if cutter.step > 12 else 1
        cuts += cutter.feed(started, finished, 0, now)
    renumbered = [at for at in range(1, len(cuts)) if cuts[at].step < cuts[at - 1].step]
    return cuts[max(renumbered, default=0) :]


def content(cut: Cut) -> tuple[object, ...]:
    return cut.step, cut.start_ns, cut.end_ns, cut.pauses.total_ns, cut.rows["ticket"].tolist()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("period_ms", [50.0, 400.0])
def test_iterations_cut_together_are_those_cut_singly(loop: str, period_ms: float) -> None:
    world, program = LOOPS[loop]
    rank = g.Job(world, jitter=0.02).play(program).ranks[0]
    singly = {cut.step: cut for cut in cut_all(rank, 1, period_ms)}
    together = cut_all(rank, 4, period_ms)
    several = [cut for cut in together if cut.steps > 1]
    assert len(several) > 3
    assert all(cut.end_ns - cut.start_ns <= 1.5 * LONGEST_TOGETHER_NS for cut in several)
    assert all((cut.step + 1) % cut.steps == 0 for cut in several if cut.steps in (2, 4))
    apart = [single for cut in together for single in cut.singles()]
    assert [cut.step for cut in apart] == list(range(apart[0].step, apart[-1].step + 1))
    assert len(singly) - len(apart) < 8  # the last ones still wait for company
    marked = "not marked" not in loop
    for cut in apart:
        assert content(cut)[: 3 + marked] == content(singly[cut.step])[: 3 + marked]


def test_iterations_that_are_not_short_are_cut_singly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    rank = g.Job(1).play(g.ddp(60)).ranks[0]
    assert all(cut.steps == 1 for cut in cut_all(rank, 64, 50.0))


def test_times_of_iterations_cut_together_are_their_means() -> None:
    rank = g.Job(2, jitter=0.05).play(g.ddp(60)).ranks[0]
    several = [cut for cut in cut_all(rank, 4, 50.0) if cut.steps == 4]
    for cut in several:
        one = summarise(cut, 0, {})
        each = [summarise(single, 0, {}) for single in cut.singles()]
        assert one.step == each[-1].step
        for name in ("duration_s", "self_s", "blocked_s", "backward_s", "optimizer_s", "data_s"):
            assert getattr(one, name) == pytest.approx(np.mean([getattr(single, name) for single in each]))


@pytest.mark.parametrize("together", [1, 4])
def test_the_onset_is_told_to_the_iteration(together: int) -> None:
    job = g.Job(1, jitter=0.02)
    job.ranks[0].slow = lambda step: 1.5 if step >= 101 else 1.0
    job.play(g.ddp(160))
    track = RankTrack(0, "node", {0})
    found: list[Finding] = []
    for started, finished, now in g.polls(job.ranks[0].table(), 50.0):
        track.cutter.together = together if track.cutter.step > 40 else 1
        found += track.take(started, finished, 0, now, list).findings
    (slow,) = found
    assert (slow.kind, slow.onset_step, slow.together) == ("slow", 101, together)
    told = track.iterations(90, 120)
    assert [one.step for one in told] == list(range(90, 121))
    assert all(one.streams for one in told)
    assert track.blocks(150, 150)
