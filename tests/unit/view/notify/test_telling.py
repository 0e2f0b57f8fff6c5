"""What of a run is told, and when."""

from __future__ import annotations

import pytest
from tests.unit.view.notify.told_runs import (
    HOSTILE,
    LOOSE,
    START_S,
    Look,
    acted,
    crash,
    culprit,
    ended,
    over,
    seen,
    slow,
)

from keepstep.core.incident import Culprit, Recovery
from keepstep.view.notify.telling import Rules


def test_an_incident_is_told_once_from_verdict_to_relief() -> None:
    look, one = Look(), slow(1, 3)
    assert look.what(seen()) == []
    (opened,) = look.at(seen(one))
    assert (opened.what, opened.severity, opened.incident and opened.incident.number) == (
        "opened",
        "warning",
        1,
    )
    assert opened.title.startswith("train-7b: the job is slow: rank 3")
    assert any(line.startswith("do: ") for line in opened.lines)
    assert look.what(seen(one)) == []
    assert look.what(seen(acted(one))) == [("action", 1)]
    assert look.what(seen(acted(one))) == []
    assert look.what(seen(over(acted(one)))) == [("over", 1)]
    assert look.what(seen(over(acted(one)))) == []


def test_what_is_read_after_the_first_look_and_was_over_before_is_no_news() -> None:
    look, many = Look(Rules()), [over(slow(number, 3)) for number in range(1, 41)]
    assert look.what(seen(*many[20:])) == []
    look.restart()
    many[5] = slow(6, 3)
    assert look.what(seen(*many)) == [("opened", 6)]
    assert look.what(seen(*many, crash(41, 2))) == [("opened", 41)]


def test_a_verdict_is_told_again_where_it_names_somebody_else() -> None:
    look = Look()
    assert look.what(seen(slow(1))) == [("opened", 1)]
    assert look.what(seen(slow(1, 3))) == [("sharper", 1)]
    surer = slow(1, culprits=(culprit(3, "medium"),), evidence=("more of it",))
    assert look.what(seen(surer)) == []
    assert look.what(seen(slow(1, 2, 3))) == [], "less than a minute after the last change"
    assert look.what(seen(slow(1, 2, 3)), 60) == [("sharper", 1)]


def test_a_wavering_verdict_is_told_rarely() -> None:
    look = Look()
    look.at(seen(slow(1, 0)))
    changes = [look.what(seen(slow(1, turn % 2 + 1)), 10) for turn in range(1, 721)]
    assert sum(map(len, changes)) == 1 + 1 + 1 + 1, (
        "at once, after 1 and 10 minutes, after an hour: two hours"
    )


def test_one_action_that_stands_for_another_is_told_once() -> None:
    """The list of actions is bounded, so that it does not grow for ever: the newest tells."""
    look, one = Look(), slow(1, 3)
    first = acted(one, begun_unix_s=START_S + 10)
    second = acted(one, "S4, replacement of nodes", begun_unix_s=START_S + 20)
    look.at(seen(one))
    assert look.what(seen(first)) == [("action", 1)]
    (notice,) = look.at(seen(second))
    assert "S4, replacement" in notice.title
    assert look.what(seen(acted(second, begun_unix_s=START_S + 10))) == []


def test_at_the_first_look_only_what_is_open_is_news() -> None:
    look = Look()
    assert look.what(seen(over(slow(1, 3)), slow(2, 1))) == [("opened", 2)]
    assert Look().what(ended(1, over(crash(1, 3), "ended"))) == []


def test_nothing_is_known_before_there_is_a_status() -> None:
    look = Look()
    assert look.what(seen(state="", newest_step=-1)) == []
    assert look.what(seen(state="created", newest_step=-1)) == []
    assert look.what(seen(over(slow(1, 3)))) == [("over", 1)], "it came and went after the first look"


def test_a_death_after_which_training_went_on() -> None:
    look, recovery = Look(), Recovery(1, 3, "was killed", 0.29, (), 1, 4)
    look.at(seen())
    (notice,) = look.at(seen(over(crash(1, 3, recovery=recovery))))
    assert notice.incident is not None
    assert notice.incident.recovery_s == 0.29


def test_the_end_tells_of_what_ended_it() -> None:
    look = Look()
    look.at(seen(slow(1, 2)))
    notices = look.at(ended(137, over(slow(1, 2), "ended"), over(crash(2, 3), "ended")))
    assert [(one.what, one.severity) for one in notices] == [("died", "critical")]
    assert notices[0].job.exit_code == 137
    assert "rank 3" in " ".join([notices[0].title, *notices[0].lines])
    assert look.what(ended(137)) == []


@pytest.mark.parametrize(
    ("code", "category", "told"),
    [
        (0, "finished", ("ended", "info")),
        (79, "stopped", ("ended", "info")),
        (75, "scheduler", ("died", "warning")),
        (75, "infrastructure", ("died", "critical")),
    ],
)
def test_how_grave_an_end_is(code: int, category: str, told: tuple[str, str]) -> None:
    look = Look()
    look.at(seen())
    assert [(one.what, one.severity) for one in look.at(ended(code, category=category))] == [told]


def test_an_end_that_only_the_controller_tells_is_told_after_a_while() -> None:
    look = Look()
    look.at(seen())
    assert look.what(seen(state="failed", age_s=10)) == []
    assert look.what(seen(state="failed", age_s=60)) == [("died", -1)]


def test_silence_is_told_after_a_minute_and_its_end() -> None:
    look = Look()
    look.at(seen())
    assert look.what(seen(state="silent", age_s=59)) == []
    assert look.what(seen(state="silent", age_s=60)) == [("silent", -1)]
    assert look.what(seen(state="silent", age_s=61)) == []
    assert look.what(seen()) == [("heard", -1)]
    assert look.what(seen()) == []


def test_what_is_not_grave_or_sure_enough_is_not_told() -> None:
    look = Look(Rules(least_severity="critical"))
    look.at(seen())
    assert look.what(seen(slow(1, 3))) == []
    assert look.what(seen(acted(slow(1, 3)))) == []
    assert look.what(seen(over(slow(1, 3)))) == []
    assert look.what(seen(crash(2, 3))) == [("opened", 2)]
    assert look.what(seen(over(crash(2, 3)))) == [("over", 2)], "who was woken is told that it is over"
    assert look.what(ended(0, category="finished")) == []

    look = Look(Rules(least_confidence="medium"))
    look.at(seen())
    assert look.what(seen(slow(1))) == []
    assert look.what(seen(slow(1, culprits=(culprit(3), culprit(4, "low"))))) == []
    assert look.what(seen(slow(1, 3))) == [("opened", 1)]
    assert look.what(seen(crash(2, 3, culprits=()))) == [("opened", 2)], "a death is a fact"


def test_what_comes_and_goes_is_held_back_until_it_is_calm() -> None:
    look = Look(Rules(at_once=100))
    look.at(seen())
    told: list[str] = []
    past = []
    for number in range(1, 21):
        one = slow(number, 3)
        told += [what for what, _ in look.what(seen(*past, one), 10)]
        past.append(over(one))
        told += [what for what, _ in look.what(seen(*past), 10)]
    assert told == ["opened", "over", "opened", "over", "flapping"]
    assert look.what(seen(*past), 590) == []
    (calm,) = look.at(seen(*past), 20)
    assert (calm.what, calm.stands_for, calm.severity) == ("calm", 17, "info")
    assert look.what(seen(*past, slow(21, 3))) == [("opened", 21)], "it is news again"


def test_what_flapped_and_then_stays_is_told() -> None:
    look, past = Look(), []
    look = Look(Rules(at_once=100, flapping_times=2))
    look.at(seen())
    for number in (1, 2):
        look.at(seen(*past, slow(number, 3)))
        past.append(over(slow(number, 3)))
        look.at(seen(*past))
    assert look.what(seen(*past, slow(3, 3))) == []
    assert look.what(seen(*past, slow(3, 3)), 600) == [("calm", 3)]
    assert look.what(seen(*past, over(slow(3, 3)))) == [("over", 3)]


def test_others_are_told_while_one_flaps() -> None:
    look = Look(Rules(flapping_times=2))
    look.at(seen())
    look.at(seen(slow(1, 3), slow(2, 3)))
    assert look.what(seen(slow(1, 3), slow(2, 3), slow(3, 3), slow(4, 1))) == [("opened", 4)]


def test_a_storm_becomes_a_summary() -> None:
    look = Look(Rules())
    look.at(seen())
    storm = [slow(number, number) for number in range(1, 10_001)]
    storm[5000] = crash(5001, 3)
    notices = look.at(seen(*storm))
    assert [one.what for one in notices] == ["opened"] * 9 + ["summary"]
    assert notices[0].severity == "critical", "the gravest is told by itself"
    assert sum(one.stands_for for one in notices) == 10_000
    assert "9991 slow opened" in notices[-1].title
    assert look.what(seen(*storm)) == []
    # Of what only a summary stands for no more is told one by one.
    assert look.what(seen(*map(over, storm)), 3600) == [
        ("over", number) for number in (1, 2, 3, 4, 5, 6, 7, 8, 5001)
    ]


def test_what_is_too_much_for_now_is_summed_up_later() -> None:
    look = Look(Rules(at_once=2, per_hour=60))
    look.at(seen())
    incidents = []
    told = []
    for number in range(1, 61):
        incidents.append(slow(number, number))
        told += look.at(seen(*incidents), 10)
    assert [one.what for one in told[:3]] == ["opened", "opened", "summary"]
    assert len(told) <= 2 + 10, "ten minutes"
    waiting = sum(look.notices.told.folded.counts.values())
    assert sum(one.stands_for for one in told) + waiting == 60
    assert look.what(ended(1, *incidents))[-1] == ("died", -1), "the end is told however much was told"


def test_a_restart_tells_nothing_twice() -> None:
    look, one = Look(), slow(1, 3)
    look.at(seen())
    look.at(seen(one))
    look.restart()
    assert look.what(seen(one)) == []
    assert look.what(seen(over(one), slow(2, 1))) == [("over", 1), ("opened", 2)]
    look.restart()
    assert look.what(seen(over(one), over(slow(2, 1)))) == [("over", 2)]
    look.restart()
    assert look.what(ended(1, over(one), over(slow(2, 1)))) == [("died", -1)]
    look.restart()
    assert look.what(ended(1, over(one), over(slow(2, 1)))) == []


def test_what_happened_while_no_server_ran_is_told() -> None:
    look = Look()
    look.at(seen(slow(1, 3)))
    look.restart()
    told = look.what(ended(1, over(slow(1, 3)), over(slow(2, 2)), over(crash(3, 1), "ended")), 3600)
    assert told == [("over", 1), ("over", 2), ("died", -1)]


def test_another_run_in_the_same_folder_is_told_of_anew() -> None:
    look = Look()
    look.at(seen())
    look.at(seen(slow(1, 3), slow(2, 3)))
    again = slow(1, 3, detected_unix_s=START_S + 9000)
    assert look.what(seen(again)) == [("opened", 1)]
    assert look.what(seen(again)) == []


def test_clocks_may_jump() -> None:
    look = Look(Rules(at_once=1, per_hour=60))
    look.at(seen())
    assert look.what(seen(slow(1, 1))) == [("opened", 1)]
    assert look.what(seen(slow(1, 1), slow(2, 2)), -90_000) == []
    assert look.what(seen(slow(1, 1), slow(2, 2)), 60) == [("summary", -1)]


def test_what_the_job_says_stays_one_line() -> None:
    look = Look()
    look.at(seen())
    bad = Culprit(None, None, HOSTILE, HOSTILE, 2.0, "high", HOSTILE, HOSTILE)
    snapshot = seen(slow(1, culprits=(bad,), summary=HOSTILE, evidence=(HOSTILE,)))
    (notice,) = look.at(snapshot)
    assert all(text.isprintable() for text in (notice.title, *notice.lines, notice.id))
    assert notice.incident is not None
    assert notice.incident.culprits[0].node.isprintable()


def test_a_notice_is_small_however_large_the_job() -> None:
    look = Look()
    look.at(seen())
    large = slow(1, *range(5000), victims=tuple(range(131_072)), evidence=("x" * 100_000,) * 100)
    (notice,) = look.at(seen(large))
    assert notice.incident is not None
    assert (notice.incident.culprit_count, len(notice.incident.culprits)) == (5000, 16)
    assert notice.incident.victim_count == 131_072
    assert sum(map(len, notice.lines)) < 10_000


def test_loose_rules_hold_nothing_back() -> None:
    look = Look(LOOSE)
    look.at(seen())
    assert len(look.at(seen(*(slow(number, 3) for number in range(1, 501))))) == 500
