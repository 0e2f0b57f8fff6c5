"""The judge of the field cases, given runs made by hand: what is right, and what each kind of mistake is called."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks._report import Report
from benchmarks.field.__main__ import chosen, main, result_of, summarise
from benchmarks.field.judge import Judgement, Seen, judge
from benchmarks.field.running import GivenUp, give_up, missing, run_case, scrubbed
from benchmarks.field.truth import Truth, parse, read


def culprit(rank: int | None, confidence: str = "high", **more: Any) -> dict[str, Any]:
    return {"rank": rank, "link": None, "confidence": confidence, "stage": "", "cause": "asleep", **more}


def incident(kind: str, *culprits: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"kind": kind, "culprits": list(culprits), "actions": [], "onset_step": 40, **more}


def seen(*incidents: dict[str, Any], said: str = "", code: int = 1, texts: tuple[str, ...] = ()) -> Seen:
    return Seen(incidents, texts or tuple("" for _ in incidents), said, code)


def judged(truth: dict[str, Any], seen: Seen) -> Judgement:
    return judge(parse("00-case", truth), seen)


def why(truth: dict[str, Any], seen: Seen) -> str:
    return "; ".join(judged(truth, seen).why)


CULPRIT_1 = {"culprits": [1], "victims": [0, 2]}


def test_the_right_culprit_is_right() -> None:
    found = judged(CULPRIT_1, seen(incident("hang", culprit(1))))
    assert found == Judgement("right", (), harmed=False, wrong_with_high=False)


def test_nothing_said_is_silent() -> None:
    found = judged(CULPRIT_1, seen(said="rank 0 done\n\n", code=0))
    assert found.status == "wrong"
    assert found.why == ("silent: no incident (last line: rank 0 done)",)
    assert not found.wrong_with_high


def test_the_last_incident_is_judged() -> None:
    assert (
        why({"culprits": [1]}, seen(incident("slow", culprit(1, "low")), incident("hang", culprit(1)))) == ""
    )
    assert "nobody named, true [1]: crash step 40" in why(
        {"culprits": [1]}, seen(incident("hang", culprit(1)), incident("crash"))
    )


@pytest.mark.parametrize("confidence", ["low", "medium", "high"])
def test_a_wrong_culprit_is_told_with_its_confidence(confidence: str) -> None:
    found = judged({"culprits": [1]}, seen(incident("hang", culprit(0, confidence))))
    assert found.why == (f"wrong culprit, true [1]: hang step 40 (rank 0 {confidence}: asleep)",)
    assert found.wrong_with_high is (confidence == "high")


def test_a_wrong_culprit_of_any_incident_counts_when_the_confidence_is_high() -> None:
    found = judged({"culprits": [1]}, seen(incident("hang", culprit(0)), incident("crash", culprit(1))))
    assert (found.status, found.wrong_with_high) == ("right", True)


def test_one_too_many_and_one_too_few_are_wrong() -> None:
    both = incident("crash", culprit(0), culprit(1))
    assert "wrong culprit" in why({"culprits": [1]}, seen(both))
    assert why({"culprits": [0, 1]}, seen(both)) == ""
    assert "named [1] alone, true [0, 1]" in why({"culprits": [0, 1]}, seen(incident("crash", culprit(1))))


def test_a_list_of_lists_has_alternatives() -> None:
    truth = {"culprits": [[0], [1], [0, 1]]}
    for named in ([0], [1], [0, 1]):
        assert why(truth, seen(incident("hang", *map(culprit, named)))) == ""
    assert "true [0] or [1] or [0, 1]" in why(truth, seen(incident("hang", culprit(2))))


def test_a_link_is_not_the_rank_that_was_meant() -> None:
    link = culprit(None, link={"nodes": ["a", "b"]})
    found = judged({"culprits": [1]}, seen(incident("hang", link)))
    assert found.status == "wrong"
    assert found.wrong_with_high


def test_a_victim_named_in_whichever_incident_is_wrong() -> None:
    blamed = (incident("hang", culprit(2, "low")), incident("crash", culprit(1)))
    assert why(CULPRIT_1, seen(*blamed)) == "victims [2] named in incident 1 of 2"


def test_a_healthy_job_ends_by_itself_and_nobody_is_blamed_for_sure() -> None:
    truth = {"healthy": True, "limit_s": 200}
    doubted = incident("slow", culprit(0, "medium"))
    assert judged(truth, seen(doubted, code=0)).status == "right"
    alarm = judged(truth, seen(incident("slow", culprit(0)), code=0))
    assert alarm.why == ("false alarm: slow of rank 0 with confidence high",)
    assert (alarm.harmed, alarm.wrong_with_high) == (False, True)
    cut_off = judged(truth, replace(seen(code=143), cut_off=True))
    assert cut_off.why == ("the job did not end by itself",)
    assert not cut_off.harmed
    assert judged(truth, seen(code=1)).harmed


def test_a_healthy_job_whose_process_was_ended_is_harmed() -> None:
    truth = {"healthy": True}
    action = {"name": "end the hung process", "detail": "rank 0, process 4711"}
    acted = judged(truth, seen(incident("hang", culprit(0, "low"), actions=[action]), code=0))
    assert acted.harmed
    assert "harmed: the process of rank 0 was ended" in acted.why
    told = "keepstep: rank 2: it hung: its process is stopped; restart 1 of 2\n"
    again = judged(truth, seen(said=told, code=0))
    assert again.why == ("harmed: the process of rank 2 was ended", "harmed: the job began again 1 times")


def test_ending_the_culprit_of_a_hang_harms_nobody() -> None:
    told = "keepstep: rank 1: it hung: its process sleeps; restart 1 of 2\n"
    assert judged({"culprits": [1]}, seen(incident("hang", culprit(1)), said=told)).status == "right"
    other = judged({"culprits": [0]}, seen(incident("hang", culprit(0)), said=told))
    assert (other.status, other.harmed) == ("wrong", True)


def test_kinds_and_a_desync_is_a_hang() -> None:
    for kind in ("hang", "desync"):
        assert why({"culprits": [1], "kinds": ["hang"]}, seen(incident(kind, culprit(1)))) == ""
    assert why({"culprits": [1], "kinds": ["hang"]}, seen(incident("crash", culprit(1)))) == (
        "wrong kind crash, true hang"
    )
    assert "wrong kind desync" in why(
        {"culprits": [1], "kinds": ["crash"]}, seen(incident("desync", culprit(1)))
    )


def test_one_of_the_sites_is_named_in_the_text_or_the_json() -> None:
    truth = {"culprits": [1], "sites": ["train.py:13", "train.py:12"]}
    told = incident("hang", culprit(1))
    assert why(truth, seen(told, texts=("evidence  called at\n          train.py:12",))) == ""
    assert why(truth, seen({**told, "evidence": ["at train.py:13"]})) == ""
    assert why(truth, seen({**told, "evidence": ["at train.py:130"]})) == (
        "site missing: train.py:13 or train.py:12"
    )


def test_words_are_found_across_the_folds_of_a_verdict() -> None:
    truth = {"culprits": [1], "says": "80 B.*128 B"}
    told = incident("hang", culprit(1))
    assert why(truth, seen(told, texts=("rank 1 in ALLGATHER of 80\n          B, ranks 0,2 of 128 B",))) == ""
    # what the script itself prints is not the verdict
    assert why(truth, seen(told, said="80 B against 128 B")) == "words missing: 80 B.*128 B"


def test_words_that_are_not_about_a_culprit_may_stand_anywhere_in_a_line() -> None:
    truth = {"says": "rank 1 .*(never|not) saved"}
    said = "keepstep: rank 1 has never saved a state\n"
    assert judged(truth, seen(said=said, code=0)).status == "right"
    assert judged(truth, seen(incident("crash", culprit(1)), said=said)).status == "right"
    apart = "rank 1 starts at 0\nnothing was not saved\n"
    assert why(truth, seen(said=apart, code=0)).startswith("words missing")


def test_words_that_are_to_be_said_once() -> None:
    truth = {"ranks": 1, "says_once": "starts ranks itself, or those ranks watched"}
    line = "keepstep: the script starts ranks itself (3 inside of 1)\n"
    assert why(truth, seen(said=line)) == ""
    assert "said 2 times, not once" in why(truth, seen(said=2 * line))
    assert "said 0 times, not once" in why(truth, seen(said="RingError"))
    assert why(truth, seen(incident("hang", culprit(2), world_size=3))) == ""
    assert "said 0 times" in why(truth, seen(incident("hang", culprit(0), world_size=1)))


def test_step_phase_restarts_and_confidence() -> None:
    hang = incident("hang", culprit(1, "medium", stage="data loading"))
    base = {"culprits": [1]}
    assert why({**base, "onset_step": 40, "phase": "data"}, seen(hang)) == ""
    assert why({**base, "onset_step": 60}, seen(hang)) == "step 40, true 60"
    assert why({**base, "phase": "backward"}, seen(hang)) == "phase data loading, true backward"
    assert why({**base, "confidence_at_least": "medium", "confidence_at_most": "medium"}, seen(hang)) == ""
    assert "at least high is right" in why({**base, "confidence_at_least": "high"}, seen(hang))
    assert "at most low is right" in why({**base, "confidence_at_most": "low"}, seen(hang))
    again = "keepstep: rank 1: exit code 0; restart 2 of 3"
    assert why({**base, "restarts_at_most": 1}, seen(hang, said=again)) == "2 restarts, at most 1 are right"
    assert why({**base, "restarts_at_most": 1}, seen({**hang, "incarnation": 1})) == ""


def test_slowdowns_of_a_log_within_three_steps() -> None:
    truth = {"analyze": True, "slow": [[121, 160]]}

    def slow(onset: int, relief: int | None) -> dict[str, Any]:
        return incident("slow", onset_step=onset, relief_step=relief)

    assert why(truth, seen(slow(119, 163))) == ""
    assert why(truth, seen(slow(117, 160))) == "slow from 117 to 160, true 121 to 160"
    assert why(truth, seen(slow(121, None))) == "slow from 121 to None, true 121 to 160"
    assert why(truth, seen(said="is no trace")) == "silent: no incident (last line: is no trace)"
    assert why(truth, seen(slow(20, 30), slow(121, 160))) == "2 slowdowns (20 to 30, 121 to 160), true 1"


def test_a_healthy_trace_has_nothing_in_it() -> None:
    truth = {"analyze": True, "healthy": True}
    assert why(truth, seen(code=0)) == ""
    assert why(truth, seen(said="missing   dumps of rank 1", code=2)).startswith(
        "exit code 2: last line: missing"
    )
    assert why(truth, seen(incident("slow"))) == "exit code 1: slow step 40 (nobody named)"


def test_a_note_alone_is_noted() -> None:
    assert judged({"note": "read it"}, seen(incident("hang", culprit(0)))).status == "noted"
    assert judged({"note": "read it", "says": "deeper"}, seen(said="one deeper")).status == "right"


def test_unknown_fields_are_not_passed_over() -> None:
    with pytest.raises(ValueError, match="00-case: unknown fields culprit"):
        parse("00-case", {"culprit": [1]})
    with pytest.raises(ValueError, match="confidence_at_most is 'sure'"):
        parse("00-case", {"confidence_at_most": "sure"})


def test_a_truth_is_read(tmp_path: Path) -> None:
    made = {
        "11-exit": {"ranks": 3, "limit_s": 60, "flags": "--max-restarts 3", "culprits": [1], "needs": "a, b"},
        "F1-dump": {"analyze": True, "slow": [[1, 2]]},
    }
    (tmp_path / "truth.json").write_text(json.dumps(made))
    job, dump = read(tmp_path)
    assert (job.name, job.number, job.flags) == ("11-exit", "11", ("--max-restarts", "3"))
    assert (job.culprits, job.needs) == ((frozenset({1}),), ("a", "b"))
    assert (dump.analyze, dump.slow, dump.judged) == (True, ((1, 2),), True)
    assert missing(job) == "a, b not installed (`make test-long` installs them)"
    assert [truth.name for truth in chosen([job, dump], "", "jobs")] == ["11-exit"]
    assert [truth.name for truth in chosen([job, dump], "", "traces")] == ["F1-dump"]
    assert [truth.name for truth in chosen([job, dump], "F1, 11-exit", "jobs")] == ["11-exit", "F1-dump"]
    with pytest.raises(ValueError, match="no case 12"):
        chosen([job, dump], "11,12", "jobs")


def test_a_result_has_no_path_of_this_machine(tmp_path: Path) -> None:
    folder, samples = tmp_path / "runs" / "11", tmp_path / "samples"
    said = f'File "{folder}/train.py", line 3\nFile "{samples}/x"\n'
    kept = result_of(Truth("11"), seen(incident("crash"), said=said), 1.23, (folder, samples))
    assert kept["console"] == 'File "CASE/train.py", line 3\nFile "SAMPLES/x"\n'
    assert (kept["saw"], kept["wall_s"]) == (["crash step 40 (nobody named)"], 1.2)
    assert scrubbed(f"{samples}", folder, samples) == "SAMPLES"


def test_a_summary_counts_what_the_goals_are_about() -> None:
    def result(status: str, **more: Any) -> dict[str, Any]:
        return {"failed": "", "status": status, "why": [], "saw": [], **more}

    report = Report("field", quick=True, packages=())
    summarise(
        report,
        [
            (Truth("01"), result("right")),
            (Truth("02"), result("wrong", why=["silent"], wrong_with_high=True)),
            (Truth("03", note="read it"), result("noted", saw=["hang"])),
            (Truth("04"), {"failed": "no such file"}),
        ],
    )
    lines = {line.name.strip(): line for line in report.lines}
    assert (lines["right"].value, lines["right"].met) == ("1/3", False)
    assert (lines["harmed"].value, lines["harmed"].met) == (0, True)
    assert (lines["wrong culprit of confidence high"].value, lines["02"].limit) == (1, "silent")
    assert lines["03"].limit == "to be read: read it; seen: hang"
    assert lines["04"].limit == "the bench: no such file"


def test_a_bench_that_is_ended_keeps_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from threading import Event

    from benchmarks.field import running

    monkeypatch.setattr(running, "_given_up", Event())
    give_up()
    with pytest.raises(GivenUp):
        run_case(Truth("11"), tmp_path, tmp_path / "runs")


def test_samples_that_are_not_there_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--samples", str(tmp_path)]) == 0
    assert "left out: all cases: --samples" in capsys.readouterr().out
