"""What an operator is told at 3 a.m.: in words, safe for a terminal and a shell, and honest."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.view.example_runs import CRASH, HANG, NOW_S, SLOW, SLOW_LINK, run, table

from keepstep.core.incident import Action, Culprit, Incident
from keepstep.view import advice
from keepstep.view.run_snapshot import NodeView, RunEnd
from keepstep.view.words import answer, answer_about, for_how_long, worst_first

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def lines(*args: object, **kwargs: object) -> list[str]:
    return [f"{label:<6}{text}" for label, text in answer(*args, **kwargs).lines]  # type: ignore[arg-type]


def test_a_slow_rank() -> None:
    assert lines(run(SLOW)) == [
        "      the job is slow: rank 3 gpu-1, compute, confidence high",
        "what  step 400, iteration 623 ms → 1.1 s (×1.76), seen at step 402",
        "who   rank 3 gpu-1  compute ×2.0; pipeline stage 1; in forward and backward, confidence high",
        "      not to blame: ranks 0-2 waiting (3 of 4)",
        "since step 400, ≈ 07:48:00 UTC, for 12 min, open, 960 GPU-seconds lost so far",
        "done  none yet: a remedy is applied once one pays",
        "do    Look at clocks, temperature and neighbours of that device, and other processes on the node.",
        "      keepstep validate train-7b --ranks 3  # holds the training for seconds, tests the devices",
        "      keepstep report train-7b 0001  # all evidence and the timeline",
    ]


def test_a_job_that_an_operator_has_not_watched_is_not_called_healthy() -> None:
    off = replace(run(), unwatched_since_unix_s=NOW_S - 60, thresholds={"slow-ratio": "1.5"})
    told = answer(off)
    assert told.mood == "unknown"
    assert told.headline.startswith("an operator has it not watched")
    assert told.advice[0].command == "keepstep ctl train-7b watch on"
    assert any(one.startswith("watching is off since ") for one in told.notes)
    assert "thresholds by order of an operator: slow-ratio=1.5" in told.notes
    assert any(
        one.startswith("watching is off since ") for one in answer(replace(off, incidents=(SLOW,))).notes
    )


def test_a_spare_may_take_the_place() -> None:
    spare = replace(run(SLOW), spares=("gpu-9",))
    command = "keepstep ctl train-7b replace gpu-1 --dry-run"
    assert command in [step.command for step in answer(spare).advice]


def test_a_hang_with_its_outlook_and_the_worst_first() -> None:
    told = answer(run(SLOW_LINK, SLOW, HANG), "runs/7")
    assert told.headline == "the job hangs: rank 1 gpu-0, asleep in backward, confidence medium"
    assert told.done == ("none yet, it may go on by itself: ends rank 1 in 20 s if nothing moves",)
    assert told.others == (
        "the job is slow: rank 3 gpu-1, compute, confidence high",
        "the job is slow: link gpu-0 ↔ gpu-1 (rank 1 ↔ 2), network, confidence medium",
    )
    assert [step.command for step in told.advice] == [
        "",
        "py-spy dump --pid PID",
        "keepstep status runs/7",
        "keepstep ctl runs/7 restart --now",
        "keepstep report runs/7 0003",
    ]


def test_a_crash_tells_cause_and_advice_and_that_it_begins_again() -> None:
    told = answer(run(CRASH, state="recovering"))
    assert (told.mood, told.headline) == (
        "changing",
        "the job crashed: rank 2 gpu-1, process died, confidence high",
    )
    assert told.who[0] == "node: the node's memory was full, confidence high"
    assert told.done == ("all nodes begin again: restart 1 of 3",)
    assert told.advice[0].text == "Give the workers less, or the node more"
    assert "keepstep why train-7b 0004 --lines" in [step.command for step in told.advice]


def test_an_unknown_cause_is_told_as_one() -> None:
    told = answer(run(replace(SLOW, culprits=(), missing=("clocks of gpu-2",))))
    assert (told.mood, told.headline) == ("unknown", "the job is slow: cause unknown")
    assert told.who[0] == "cause unknown; missing: clocks of gpu-2"
    assert told.advice[0].text == "To know more: clocks of gpu-2"


def test_nothing_wrong() -> None:
    over = replace(SLOW, status="relieved", relief_step=415, closed_unix_s=NOW_S - 500)
    assert lines(run(over)) == [
        "      healthy: step 512, nothing is wrong",
        "also  1 before, the last 0001: over: the job is slow: rank 3 gpu-1, compute, confidence high; "
        "step 415, over after 15 steps, 960 GPU-seconds lost",
    ]


def test_what_was_done_about_it_is_told_when_all_is_well_again() -> None:
    moved = Action("S3, exchange of nodes", detail="gpu-1 and gpu-2 take each other's ranks")
    over = replace(SLOW, status="relieved", relief_step=415, actions=(Action("none"), moved))
    assert answer(run(over)).done == (
        "about 0001: S3, exchange of nodes: gpu-1 and gpu-2 take each other's ranks",
    )
    assert answer(run(replace(over, actions=(Action("none", detail="nobody is told apart"),)))).done == ()


def test_healthy_only_as_far_as_it_is_watched() -> None:
    watched = replace(table(), is_watched=~(table().rank > 1))
    nodes = (
        NodeView(0, "gpu-0", agent="silent"),
        NodeView(1, "gpu-1", notices=("rank 3: not watched: why",)),
    )
    told = answer(replace(run(), ranks=watched, nodes=nodes[1:]))
    assert told.headline == "healthy as far as it is watched: 2 of 4 ranks are not"
    told = answer(replace(run(), nodes=nodes))
    assert told.headline == "healthy as far as it is watched: 2 of 4 ranks are not", (
        "what agents said last is old"
    )
    told = answer(replace(run(), ranks=watched, nodes=nodes, backup_trouble="no memory on gpu-1"))
    assert (told.mood, told.headline) == ("unknown", "none of its 4 ranks is watched; newest step 512")
    assert told.notes == (
        "no heartbeat from gpu-0",
        "not backed up: no memory on gpu-1",
        "rank 3: not watched: why",
    )


def test_the_log_of_a_silent_run_is_where_its_folder_is() -> None:
    silent = replace(run(), state="silent", age_s=120.0, folder="/runs/the job")
    assert answer(silent, "mine").advice[-1].command == "tail '/runs/the job/controller.log'"
    assert len(answer(replace(silent, folder="")).advice) == 2


def test_an_open_incident_that_cannot_be_read_is_not_healthy() -> None:
    told = answer(replace(run(), unread_open=(7, 3, 4)))
    assert (told.mood, told.headline) == (
        "unknown",
        "incidents open, but not to be read: 3-4,7; cause unknown",
    )
    assert answer(replace(run(SLOW), unread_open=(7,))).mood == "trouble"


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("created", "waits for its nodes, for 90 s"),
        ("recovering", "begins again: not all ranks have made a step, for 90 s"),
        ("suspended", "suspended by an operator for 90 s"),
        ("", "no status yet: the controller writes it within a second of the job's start"),
    ],
)
def test_a_run_between_two_states(state: str, told: str) -> None:
    assert (answer(run(state=state)).mood, answer(run(state=state)).headline) == ("changing", told)


def test_silence_is_no_health() -> None:
    told = answer(replace(run(SLOW, state="silent"), age_s=45.0))
    assert (told.mood, told.headline) == ("unknown", "no news for 45 s: cause unknown; newest step 512")
    assert told.others == ("the job is slow: rank 3 gpu-1, compute, confidence high",)


def test_how_it_ended() -> None:
    finished = replace(run(), state="ended", end=RunEnd(0, "finished", "finished"))
    assert lines(finished) == [
        "      finished after step 512",
        "since 2027-01-15 08:00:00 UTC, 2 h after its start",
        "do    Nothing needs to be done.",
    ]
    crash = replace(CRASH, status="ended", closed_unix_s=NOW_S)
    failed = replace(run(SLOW, crash), state="ended", end=RunEnd(137, "training", "rank 2 died"))
    told = answer(failed)
    assert told.mood == "failed"
    assert told.headline == (
        "ended with exit code 137 (rank 2 died) after step 512; "
        "the job crashed: rank 2 gpu-1, process died, confidence high"
    )
    assert [step.text for step in told.advice][:2] == [
        "See why it failed before you start it again.",
        "Give the workers less, or the node more",
    ]
    assert told.others == ("1 earlier incident",)
    silent = replace(crash, cause=None)
    told = answer(replace(failed, incidents=(silent,)))
    assert "keepstep why train-7b" in [step.command for step in told.advice]


@pytest.mark.parametrize(
    "category", ["infrastructure", "scheduler", "stopped", "signal", "unusable", "???", ""]
)
def test_whether_to_start_it_again(category: str) -> None:
    told = answer(replace(run(), end=RunEnd(75, category, "a node was lost")))
    assert told.headline.startswith("ended with exit code 75 (a node was lost)")
    assert bool(told.advice[0].command) == (category in ("???", ""))


def test_hostile_text_stays_in_its_line_and_cannot_leave_its_quotes() -> None:
    evil = "\x1b[2J<script>\n$(reboot) password=hunter2hunter2"
    culprit = Culprit(3, None, evil, evil, 2.0, "high", evil, evil)
    incident = replace(
        SLOW, culprits=(culprit,), summary=evil, missing=(evil,), actions=(Action(evil, None, evil),)
    )
    shown = replace(run(incident), spares=(evil,), backup_trouble=evil, troubles=(evil,), name=evil)
    told = answer(shown).lines
    assert all(text.isprintable() for _, text in told)
    assert not any("hunter2" in text for label, text in told if label == "who")
    commands = [step.command for step in answer(shown).advice if step.command]
    assert all("'\\x1b[2J<script>\\n$(reboot) password=" in command for command in commands)


@pytest.mark.parametrize("moment", [1e300, -1e300, float("nan"), float("inf")])
def test_times_that_no_clock_shows(moment: float) -> None:
    for incident in (SLOW, HANG, CRASH):
        odd = replace(incident, onset_unix_s=moment, next_unix_s=moment, closed_unix_s=moment)
        for status in ("open", "relieved"):
            assert answer_about(replace(odd, status=status), "RUN", NOW_S).headline


def test_thousands_of_incidents_and_notices_are_cut() -> None:
    many = [replace(SLOW, number=number) for number in range(10_000)]
    nodes = tuple(NodeView(node, f"n{node}", notices=(f"rank {node}: why",)) for node in range(10_000))
    told = answer(replace(run(*many), nodes=nodes))
    assert told.incident == 9_999
    assert (len(told.others), told.others[-1]) == (9, "and 9991 more")
    assert (len(told.notes), told.notes[-1]) == (9, "and 9992 more")


def test_worst_first() -> None:
    over: Incident = replace(HANG, number=9, status="relieved")
    assert [one.number for one in worst_first([SLOW_LINK, SLOW, over, HANG, CRASH])] == [4, 3, 1, 2]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(-1, "0 s"), (40, "40 s"), (720, "12 min"), (7200, "2 h"), (12_000, "3 h 20 min"), (259_200, "3 days")],
)
def test_for_how_long(seconds: float, told: str) -> None:
    assert for_how_long(seconds) == told


def test_what_to_look_at_is_what_the_page_says() -> None:
    text = (ROOT / "docs/howto/by-symptom.md").read_text()
    page = " ".join(re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text).split()).lower()
    sentences = {text for _, text in advice._BY_CAUSE} | {advice._SLOW_PATH, advice._HUNG_PATH}
    missing = {text for text in sentences if re.sub(r"\W+$", "", text.lower()) not in page}
    assert not missing
