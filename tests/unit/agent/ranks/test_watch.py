"""Findings of one rank: slow and relief with the right steps, hang and resumed once each."""

from __future__ import annotations

import random

from keepstep.agent.ranks.watch import RankWatch
from keepstep.core.events import Phase
from keepstep.core.finding import Finding


def test_slow_and_relief_name_the_steps_at_which_they_began() -> None:
    noise = random.Random(1)
    watch = RankWatch(3, "gpu-1")
    found: list[Finding] = []
    for step in range(5, 120):
        seconds = (0.2 if 50 <= step < 80 else 0.1) * noise.uniform(0.98, 1.02)
        finding = watch.iteration(step, seconds, 0.8 * seconds, float(step))
        if finding is not None:
            found.append(finding)
    assert [(one.kind, one.onset_step) for one in found] == [("slow", 50), ("relief", 80)]
    assert all(one.step - one.onset_step <= 3 for one in found)
    assert (found[0].rank, found[0].node) == (3, "gpu-1")
    assert 1.9 < found[0].after_s / found[0].before_s < 2.1


def test_a_slow_rank_is_found_by_its_own_time_where_the_iteration_time_is_too_noisy() -> None:
    noise = random.Random(2)
    watch = RankWatch(1, "here")
    found: list[Finding] = []
    for step in range(5, 80):
        slow = 40 <= step < 60
        own = (0.130 if slow else 0.100) * noise.uniform(0.99, 1.01)
        shared = noise.choice(
            (0.0, 0.0, 0.01, 0.03, 0.08)
        )  # what the job waits for on this step, whoever is slow
        finding = watch.iteration(step, own + 0.05 + shared, own, float(step))
        if finding is not None:
            found.append(finding)
    assert [(one.kind, one.onset_step) for one in found] == [("slow", 40), ("relief", 60)]
    assert all(one.step - one.onset_step <= 3 for one in found)


def test_own_time_that_the_job_does_not_feel_is_no_finding() -> None:
    noise = random.Random(3)
    watch = RankWatch(1, "here")
    for step in range(5, 80):
        own = (0.130 if 40 <= step < 60 else 0.100) * noise.uniform(0.99, 1.01)
        assert watch.iteration(step, 0.2 * noise.uniform(0.99, 1.01), own, float(step)) is None


def test_a_standstill_in_backward_is_a_hang_once_and_resumes_once() -> None:
    watch = RankWatch(0, "here")
    watch.incarnation = 2
    now, progress = 0.0, 0
    for step in range(10):
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            for _ in range(4):
                now, progress = now + 0.05, progress + 1
                assert watch.progress(now, progress, phase, step, False) is None
    found: list[Finding] = []
    for look in range(200):
        finding = watch.progress(now + 0.05 * look, progress + 1, Phase.BACKWARD, 9, False)
        if finding is not None:
            found.append(finding)
    assert [(one.kind, one.phase, one.step) for one in found] == [("hang", Phase.BACKWARD, 9)]
    assert found[0].incarnation == 2
    assert 1.0 <= found[0].limit_s <= found[0].stuck_s < 1.2
    after = [
        watch.progress(now + 11 + look, progress + 2 + look, Phase.BACKWARD, 9, False) for look in range(3)
    ]
    assert [one.kind for one in after if one is not None] == ["resumed"]


def test_the_one_who_waits_for_others_is_given_more_time() -> None:
    watch = RankWatch(0, "here")
    for tick in range(100):
        watch.progress(tick * 0.05, tick, Phase.BACKWARD, tick // 10, False)
    looks = [watch.progress(5 + tick * 0.1, 100, Phase.BACKWARD, 9, True) for tick in range(200)]
    assert looks == [None] * 200


def test_an_agent_that_comes_later_does_not_wait_as_in_the_start_up() -> None:
    watch = RankWatch(0, "here")
    watch.progress(0.0, 500, Phase.BACKWARD, 100, False)
    looks = [watch.progress(tick * 1.0, 500, Phase.BACKWARD, 100, False) for tick in range(1, 60)]
    assert [one.kind for one in looks if one is not None] == ["hang"]
