"""Cases whose jobs tell their own truth: what is drawn, and how the three of them judge."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks._report import Report
from benchmarks.campaign import blame_draw, odd_draw, stuck_draw
from benchmarks.campaign.__main__ import seeds_of, summarise
from benchmarks.campaign.case import kind_of
from benchmarks.campaign.cases import CASES
from benchmarks.campaign.notes import Notes
from benchmarks.campaign.odd_ways import MOVING, SILENT
from benchmarks.campaign.seeds import keep
from benchmarks.campaign.trial import ROOT, Live, Outcome, Plan, lives_in, truths_in


def outcome_of(plan: Plan, *incidents: dict[str, Any], **changes: Any) -> Outcome:
    lives = {rank: [f"began {1000 + rank}", f"done {1000 + rank}"] for rank in range(plan.nproc)}
    made = Outcome(0, 20.0, False, list(incidents), {}, lives, {}, {}, [], [], {}, "")
    return replace(made, **changes)


def why(plan: Plan, outcome: Outcome) -> str:
    name = str(plan.truth["case"])
    return "; ".join(CASES[name].judge(plan, outcome).why)


def planned(case: str, kind: str, **changes: Any) -> Plan:
    """The plan of the first seed with this kind."""
    plan = next(p for p in map(CASES[case].plan, range(200)) if p.truth["kind"] == kind)
    return replace(plan, truth={**plan.truth, "case": case}, **changes)


def named(kind: str, *ranks: int, confidence: str = "high", at_s: float = 501.0) -> dict[str, Any]:
    culprits = [{"rank": rank, "confidence": confidence} for rank in ranks]
    return {"kind": kind, "culprits": culprits, "detected_unix_s": at_s}


# --- what is drawn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("healthy-odd", odd_draw.KINDS), ("hang-true", stuck_draw.KINDS), ("blame", blame_draw.KINDS)],
)
def test_each_block_of_seeds_has_every_kind_once(name: str, kinds: dict[str, Any]) -> None:
    for block in range(3):
        drawn = [kind_of(name, block * len(kinds) + place, kinds) for place in range(len(kinds))]
        assert sorted(drawn) == sorted(kinds)
    first, second = (
        [kind_of(name, seed + start, kinds) for seed in range(len(kinds))] for start in (0, len(kinds))
    )
    assert first != second


def test_a_command_line_says_nothing_of_what_will_happen() -> None:
    for name in ("healthy-odd", "hang-true", "blame"):
        for seed in range(30):
            plan = CASES[name].plan(seed)
            assert list(plan.arguments) == ["--seed", str(seed), "--notes", "{folder}"]
            assert not plan.fault
            assert (ROOT / plan.script).is_file()


def test_kinds_whose_package_is_missing_are_not_drawn() -> None:
    everywhere = [odd_draw.draw(seed, lambda package: True) for seed in range(60)]
    bare = [odd_draw.draw(seed, lambda package: package == "torch") for seed in range(60)]
    missing = {"transformers", "accelerate", "lightning", "deepspeed"}
    assert {odd.kind for odd in everywhere} == set(odd_draw.KINDS)
    assert {odd.kind for odd in bare} == set(odd_draw.KINDS) - missing
    for whole, other in zip(everywhere, bare, strict=True):
        assert whole.kind in missing or whole == other


def test_silence_lasts_50_s_at_most_and_work_150_s() -> None:
    for seed in range(200):
        odd = odd_draw.draw(seed, lambda package: True)
        assert odd.way in odd_draw.KINDS[odd.kind]
        assert odd.seconds <= (150 if odd.way in odd_draw.MOVING else 50)
        assert odd.rank < odd.nproc
        assert odd.step < odd.steps - 20
    assert (tuple(SILENT), tuple(MOVING)) == (odd_draw.SILENT, odd_draw.MOVING)


def test_roles_are_drawn_over_all_ranks_of_both_sizes() -> None:
    sizes = Counter(blame_draw.draw(seed).nproc for seed in range(80))
    assert set(sizes) == {3, 8}
    assert min(sizes.values()) >= 25
    assert {rank for seed in range(80) for rank in blame_draw.draw(seed).ranks} == set(range(8))
    assert {len(blame_draw.draw(seed).ranks) for seed in range(80)} == {1, 2}
    assert {stuck_draw.draw(seed).nproc for seed in range(40)} == {3, 8}


def test_seeds_in_words() -> None:
    assert seeds_of("3") == range(3)
    assert seeds_of("100-102") == range(100, 103)
    with pytest.raises(ValueError, match="invalid literal"):
        seeds_of("all")


# --- what a job tells -----------------------------------------------------------------------------------------------


def test_what_a_rank_notes_is_read_by_the_scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = tmp_path / "steps-{rank}.jsonl"
    told = ["job", "--seed", "7", "--notes", str(tmp_path), "--step-times", str(times)]
    monkeypatch.setattr(sys, "argv", told)
    monkeypatch.setenv("RANK", "2")
    for restarts in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        notes = Notes()
        assert (notes.seed, notes.rank, notes.first) == (7, 2, restarts == "0")
        notes.began()
    notes.step(0)
    notes.truth(step=5)
    notes.done()
    assert [line.split()[0] for line in lives_in(tmp_path)[2]] == ["began", "began", "done"]
    (truth,) = truths_in(tmp_path)
    assert (truth["rank"], truth["step"]) == (2, 5)
    assert json.loads((tmp_path / "steps-2.jsonl").read_text())["step"] == 0


def test_a_process_that_is_gone_is_noted_once(tmp_path: Path) -> None:
    live = Live(tmp_path, [])
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        (tmp_path / "lives-1").write_text(f"began {process.pid}\n")
        live.look_at_lives()
        assert live.notes["gone"] == {}
    live.look_at_lives()
    first = dict(live.notes["gone"])
    live.look_at_lives()
    assert list(first) == [process.pid]
    assert live.notes["gone"] == first


# --- healthy-odd ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"exit_code": 1}, "exit code 1"),
        ({"lives": {0: ["began 1"], 1: ["began 2", "done 2"]}}, "rank 0 began 1 times and was done 0 times"),
        ({"lives": {0: ["began 1", "began 3", "done 3"], 1: ["began 2", "done 2"]}}, "rank 0 began 2 times"),
        ({"lives": {}}, "rank 0 began 0 times"),
        ({"timed_out": True}, "the job did not end"),
        ({"incidents": [named("hang", 0)]}, "hang with a culprit of confidence high"),
        ({"incidents": [named("hang", 0, confidence="medium"), named("slow")]}, ""),
    ],
)
def test_a_healthy_job_that_looks_odd_keeps_all_its_processes(changes: dict[str, Any], said: str) -> None:
    plan = planned("healthy-odd", "upload", nproc=2)
    found = why(plan, outcome_of(plan, **changes))
    assert (said in found) if said else not found


def test_who_is_to_be_stopped_has_been() -> None:
    plan = planned("healthy-odd", "stop")
    assert plan.stop == (plan.truth["rank"], plan.truth["step"], plan.truth["seconds"])
    assert "nobody was stopped" in why(plan, outcome_of(plan))
    assert why(plan, outcome_of(plan, notes={"stopped": 4711})) == ""


# --- hang-true ------------------------------------------------------------------------------------------------------


def stuck(kind: str, ended_after_s: float | None, **more: float) -> tuple[Plan, Outcome]:
    """A job in which rank 1 got stuck at 500 s; ``more``: when other ranks were gone."""
    plan = planned("hang-true", kind, nproc=3)
    gone = {} if ended_after_s is None else {1001: 500.0 + ended_after_s}
    gone |= {1000 + int(rank[1:]): at for rank, at in more.items()}
    truths = [{"rank": 1, "unix_s": 500.0, "step": 20}]
    return plan, outcome_of(plan, named("hang", 1), truths=truths, notes={"gone": gone})


@pytest.mark.parametrize(
    ("kind", "after_s", "said"),
    [
        ("lock", 20.5, ""),
        ("lock", 19.5, "ended after 19.5 s, before the patience of 20 s"),
        ("lock", 141.0, "ended after 141.0 s, patience 20 s"),
        ("lock", None, "the process of rank 1 was not ended"),
        ("stopped", 30.0, "before the patience of 60 s"),
        ("stopped", 65.0, ""),
        ("spinning", 190.0, "before the patience of 200 s"),
        ("spinning", 215.0, ""),
        ("set-up", 109.0, ""),
    ],
)
def test_a_true_hang_is_ended_after_its_patience(kind: str, after_s: float | None, said: str) -> None:
    plan, outcome = stuck(kind, after_s)
    found = why(plan, outcome)
    assert (said in found) if said else not found


def test_nobody_else_is_ended_before_the_one_that_is_stuck() -> None:
    assert "rank 2 was gone 3.0 s before" in why(*stuck("data", 25.0, r2=522.0))
    assert why(*stuck("data", 25.0, r2=525.1, r0=524.8)) == ""


def test_who_is_gone_after_the_order_to_end_the_one_that_is_stuck_died_of_that() -> None:
    for rank, said in (
        (1, ""),
        (2, "rank 2 was gone 2.0 s before"),
    ):  # of an order to end another rank it is wrong
        plan, outcome = stuck("data", 25.0, r2=523.0)
        action = {"name": "end the hung process", "detail": f"rank {rank}, process 7", "begun_unix_s": 522.5}
        for incident in outcome.incidents:
            incident["actions"] = [action]
        found = why(plan, outcome)
        assert (said in found) if said else not found


def test_a_seed_in_which_nobody_got_stuck_shows_nothing() -> None:
    plan, outcome = stuck("gil", 25.0)
    assert "nobody got stuck" in why(plan, replace(outcome, truths=[]))
    assert "neither went on nor ended" in why(plan, replace(outcome, timed_out=True))


# --- blame ----------------------------------------------------------------------------------------------------------


def blamed(kind: str, *incidents: dict[str, Any], **changes: Any) -> str:
    plan = planned("blame", kind)
    truths = [{"rank": rank, "unix_s": 500.0, "step": 20} for rank in plan.truth["ranks"]]
    return why(plan, outcome_of(plan, *incidents, **{"truths": truths, "exit_code": 1, **changes}))


def true_and_other(kind: str) -> tuple[int, int]:
    ranks = planned("blame", kind).truth["ranks"]
    return ranks[0], next(rank for rank in range(3) if rank not in ranks)


def test_the_right_rank_and_kind() -> None:
    true, _ = true_and_other("own storage")
    assert blamed("own storage", named("crash", true)) == ""
    assert blamed("own storage", named("hang", true)) == "kind hang, true crash"
    assert "silent" in blamed("own storage")
    assert "did not end in time" in blamed("own storage", named("crash", true), timed_out=True)
    true, _ = true_and_other("never comes to a group")
    assert blamed("never comes to a group", named("desync", true)) == ""


def test_two_that_were_killed_are_both_named() -> None:
    ranks = planned("blame", "two killed").truth["ranks"]
    assert blamed("two killed", named("crash", *ranks)) == ""
    assert "true [" in blamed("two killed", named("crash", ranks[1]))


def test_victims_are_counted_in_all_incidents() -> None:
    true, other = true_and_other("late in the data")
    plan = planned("blame", "late in the data")
    truths = [{"rank": true, "unix_s": 500.0, "step": 20}]
    twice = outcome_of(plan, named("hang", other), named("crash", true), truths=truths)
    verdict = CASES["blame"].judge(plan, twice)
    assert verdict.measured["victims_named"] == 1
    assert verdict.why == [f"victims [{other}] named"]


def test_a_seed_whose_job_did_not_get_there_shows_nothing() -> None:
    assert "told that they are to blame" in blamed("aborts", truths=[])


# --- the summary ----------------------------------------------------------------------------------------------------


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.campaign import seeds

    monkeypatch.setattr(seeds, "machine", dict)
    monkeypatch.setattr(seeds, "versions", lambda packages: {})


def test_seeds_from_100_on_are_counted_apart(tmp_path: Path, nowhere: None) -> None:
    def result(seed: int, passed: bool, victims: int) -> dict[str, Any]:
        measured = {"kind": "aborts", "victims_named": victims, "seconds_to_verdict": 1.0}
        return {"case": "blame", "seed": seed, "passed": passed, "measured": measured}

    for seed in range(40):
        keep(tmp_path, result(seed, passed=seed != 3, victims=int(seed == 3)))
    keep(tmp_path, result(100, passed=True, victims=0))
    report = Report("campaign", quick=True, packages=())
    summarise(report, tmp_path, "blame")
    told: list[tuple[Any, ...]] = [(line.name.strip(), line.value, line.met) for line in report.lines]
    assert told[:3] == [("blame", "39/40", True), ("failed", "aborts 1", None), ("victims_named", 1, False)]
    assert told[4:6] == [("blame, seeds from 100 on", "1/1", True), ("victims_named", 0, True)]
