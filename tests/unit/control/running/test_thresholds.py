"""Thresholds that an operator changes: bounded, told, kept, taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.control.running.operators_stage import Office

from keepstep.control.running.thresholds import LiveSettings
from keepstep.control.settings import Settings
from keepstep.wire import Standing, Tune, Tuned


def test_all_are_shown_with_where_they_come_from() -> None:
    live = LiveSettings(Settings(mitigate="off", max_restarts=2, restart_hangs=True))
    live.order({"hang-after": "300"})
    rows = {row.name: row for row in live.rows()}
    assert (rows["mitigate"].value, rows["mitigate"].origin) == ("off", "flag")
    assert (rows["hang-after"].value, rows["hang-after"].origin, rows["hang-after"].start) == (
        "300",
        "order",
        "0",
    )
    assert (rows["on-hang"].value, rows["on-hang"].origin) == ("restart", "default")
    assert (rows["stopped-patience"].value, rows["stopped-patience"].origin) == ("60", "default")
    assert live.now == replace(live.start, hang_after_s=300.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ([("speed", "1")], "speed is no threshold; there are mitigate, slow-ratio, hang-after"),
        ([("mitigate", "yes")], "mitigate=yes: give off or advise or auto"),
        ([("hang-after", "-1")], "hang-after=-1: give a number from 0 to 86400"),
        ([("hang-after", "nan")], "hang-after=nan: give a number from 0 to 86400"),
        ([("hang-after", "1e400")], "hang-after=1e400: give a number from 0 to 86400"),
        ([("slow-ratio", "0.5")], "slow-ratio=0.5: give a number from 1 to 10"),
        ([("on-hang", "restart")], "on-hang=restart takes a job that was started with --max-restarts"),
        ([("validate", "off"), ("validate", "on")], "validate is given twice"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(changes: list[tuple[str, str]], why: str) -> None:
    office = Office()
    office.order(Tune(tuple(changes)))
    answer = office.answer(Tuned)
    assert answer.refused.startswith(why)
    assert not answer.rows
    assert (
        office.controller.running.standing.settings.now == office.controller.running.standing.settings.start
    )


def test_a_change_is_told_to_the_log_the_folder_and_the_agents_and_taken_back() -> None:
    office = Office()
    office.order(Tune((("mitigate", "off"), ("hang-after", "120"))))
    (stored,) = office.stored()
    assert dict(stored.thresholds) == {"mitigate": "off", "hang-after": "120"}
    assert office.told() == ["thresholds: mitigate auto → off, hang-after 0 → 120"]
    assert office.sent(Standing) == [stored]
    office.order(Tune())
    assert {row.name: row.value for row in office.answer(Tuned).rows}["mitigate"] == "off"
    office.order(Tune((("mitigate", ""),), reset=True))
    assert office.answer(Tuned).done == "changed: mitigate off → auto"
    office.order(Tune(reset=True))
    assert office.answer(Tuned).done == "changed: hang-after 120 → 0"
    assert office.controller.running.standing.settings.orders == {}


def test_a_dry_run_changes_nothing() -> None:
    office = Office()
    office.order(Tune((("slow-ratio", "1.5"),), only_say=True))
    assert not office.stored()
    assert office.answer(Tuned).done == "would change: slow-ratio 1 → 1.5"
    assert office.controller.running.standing.settings.orders == {}


def test_a_small_slowdown_is_not_told_and_a_large_one_is() -> None:
    office = Office()
    office.order(Tune((("slow-ratio", "1.5"),)))
    office.run("found kind=slow rank=0-2 step=42 onset=41 before=0.5 after=0.6")
    office.run("wait 2")
    assert not office.controller.cases.incidents
    office.run("found kind=slow rank=0-2 step=62 onset=61 before=0.5 after=1.0")
    office.run("profiles rank=1 onset=61")
    assert [one.kind for one in office.controller.cases.incidents] == ["slow"]


def test_a_standstill_is_told_once_it_is_as_long_as_was_said() -> None:
    office = Office()
    office.order(Tune((("hang-after", "60"),)))
    office.run("found kind=hang rank=0 step=40 stuck=31 limit=30")
    office.go_on(28, step=40)
    assert office.asked is None
    office.go_on(1, step=40)
    office.run("states rank=0 idle=61")
    (incident,) = office.controller.cases.incidents
    assert [one.rank for one in incident.culprits] == [0]


def test_one_that_ends_before_is_never_told() -> None:
    office = Office()
    office.order(Tune((("hang-after", "60"),)))
    office.run("found kind=hang rank=0 step=40 stuck=31 limit=30")
    office.run("found kind=resumed rank=0 step=41")
    office.run("wait 60")
    assert office.asked is None


def test_a_later_controller_goes_on_with_them() -> None:
    office = Office()
    office.order(Tune((("mitigate", "advise"),)))
    (stored,) = office.stored()
    again = office.again()
    assert again.running.standing.settings.now.mitigate == "advise"
    assert again.running.standing.message == stored


def test_a_controller_without_the_files_learns_them_of_an_agent_and_tells_the_others() -> None:
    office = Office()
    known = Standing(1 << 40, 0.0, (("hang-after", "90"), ("mitigate", "nonsense")))
    office.tell(1, known)
    assert office.controller.running.standing.settings.orders == {"hang-after": "90"}
    assert [one.number for one in office.sent(Standing)] == [known.number]
    office.tell(2, Standing(5, 0.0, (("hang-after", "1"),)))
    assert office.controller.running.standing.settings.now.hang_after_s == 90.0
