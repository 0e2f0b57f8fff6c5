"""When the operator asks jobs."""

from __future__ import annotations

import itertools

from keepstep.kubernetes.rounds import ASK_S, ASK_SILENT_S, Rounds


def test_a_job_that_is_being_asked_holds_up_no_other() -> None:
    rounds = Rounds[str]()
    assert rounds.begin(["silent", "good"], 0.0) == ["silent", "good"]
    rounds.end("good", 0.1, heard=True)
    asked = [at_s / 10 for at_s in range(1, 100) if _asks(rounds, "good", at_s / 10)]
    assert len(asked) == 9
    assert rounds.begin(["silent", "good"], 10.0) == [], "the first question has not come to its end"
    rounds.end("silent", 10.0, heard=False)
    assert "silent" not in rounds.begin(["silent", "good"], 9.9 + ASK_SILENT_S)
    assert "silent" in rounds.begin(["silent", "good"], 10.0 + ASK_SILENT_S)


def _asks(rounds: Rounds[str], job: str, now_s: float) -> bool:
    begun = rounds.begin(["silent", "good"], now_s)
    for one in begun:
        rounds.end(one, now_s, heard=True)
    return job in begun


def test_a_job_that_falls_silent_is_asked_soon_for_a_while() -> None:
    rounds, asked = Rounds[str](), list[float]()
    for tick in range(700):
        now_s = tick / 10
        for job in rounds.begin(["a"], now_s):
            asked.append(now_s)
            rounds.end(job, now_s, heard=now_s < 5)
    gaps = [round(later - one, 1) for one, later in itertools.pairwise(asked)]
    assert set(gaps[:30]) == {ASK_S}
    assert set(gaps[-5:]) == {ASK_SILENT_S}


def test_very_many_jobs_are_asked_more_seldom_and_each_in_its_turn() -> None:
    rounds, jobs = Rounds[int](), range(2000)
    asked: list[int] = []
    for tick in range(40):
        for job in rounds.begin(jobs, tick * 0.1):
            asked.append(job)
            rounds.end(job, tick * 0.1, heard=True)
    assert sorted(asked) == list(jobs), "each once within 4 s, none twice before 10 s"


def test_a_job_that_is_gone_is_forgotten() -> None:
    rounds = Rounds[str]()
    assert rounds.begin(["a"], 0.0) == ["a"]
    assert rounds.begin([], 0.0) == []
    rounds.end("a", 0.0, heard=True)
    assert rounds.begin(["a"], ASK_S / 2) == ["a"], "another one of its name"
