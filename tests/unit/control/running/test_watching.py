"""Watching off and on: nothing is said meanwhile, nothing of it later, and deaths are told as ever."""

from __future__ import annotations

from tests.unit.control.running.operators_stage import Office

from keepstep.control.effects import Say
from keepstep.wire import Operated, Standing, Validate, Validated, Watch


def off(office: Office) -> None:
    office.order(Watch(False))
    assert office.answer(Operated).done.startswith("watching is off")


def on(office: Office) -> None:
    office.order(Watch(True))
    assert office.answer(Operated).done.startswith("watching is on")


def spoken(office: Office) -> list[Say]:
    return [one for one in office.effects if isinstance(one, Say)]


def test_slow_and_stuck_ranks_give_no_incident_while_it_is_off() -> None:
    office = Office()
    off(office)
    office.run("found kind=slow rank=0-2 step=42 onset=41 before=0.5 after=1.0")
    office.run("found kind=hang rank=1 step=43 stuck=40 limit=30")
    office.run("beat step=43 overdue=40")
    office.run("beat step=43 inside=60")
    office.run("wait 20")
    assert office.asked is None
    assert not office.controller.cases.incidents
    assert not spoken(office)


def test_a_rank_that_is_still_slow_is_told_once_it_is_on_again() -> None:
    office = Office()
    off(office)
    office.run("found kind=slow rank=0-2 step=42 onset=41 before=0.5 after=1.0")
    on(office)
    # As agents do when they hear of it.
    office.run("found kind=slow rank=0-2 step=42 onset=41 before=0.5 after=1.0")
    assert office.asked is None
    office.go_on(3)
    office.run("profiles rank=1 onset=41")
    (incident,) = office.controller.cases.incidents
    assert [one.rank for one in incident.culprits] == [1]


def test_one_that_was_slow_meanwhile_is_not() -> None:
    office = Office()
    off(office)
    on(office)
    office.run("found kind=slow rank=0-2 step=42 onset=41 before=0.5 after=1.0")
    office.run("found kind=relief rank=0-2 step=48 onset=46 before=1.0 after=0.5")
    office.run("wait 10")
    assert office.asked is None


def test_what_is_open_is_closed_and_says_why() -> None:
    office = Office()
    office.run("found kind=slow rank=0-2 step=42 onset=41 before=0.5 after=1.0")
    office.run("profiles rank=1 onset=41")
    assert office.controller.cases.incidents
    off(office)
    (written,) = office.written.values()
    assert written.status == "ended"
    assert [one.name for one in written.actions] == ["watching is off"]
    assert not office.controller.cases.incidents


def test_a_death_is_told_as_ever() -> None:
    office = Office()
    off(office)
    office.run("found kind=crash rank=2 step=44 code=137 message=killed")
    office.run("wait 3")
    assert [one.kind for one in office.written.values()] == ["crash"]


def test_no_rank_is_held() -> None:
    office = Office()
    off(office)
    office.order(Validate())
    assert "watching is off" in office.answer(Validated).refused
    on(office)
    office.order(Validate())
    assert office.controller.cases.desk.validations.under_way
    off_again = office.order(Watch(False))
    assert off_again
    assert not office.controller.cases.desk.validations.under_way


def test_said_twice_or_dry_it_says_so() -> None:
    office = Office()
    office.order(Watch(True))
    assert office.answer(Operated).refused == "it is watched already"
    office.order(Watch(False, only_say=True))
    assert office.answer(Operated).done.startswith("watching would be off")
    assert office.controller.running.standing.is_watched
    off(office)
    office.order(Watch(False))
    assert "it has not been watched since" in office.answer(Operated).refused


def test_it_is_remembered_every_hour() -> None:
    office = Office()
    off(office)
    office.now_s += 3599.0
    office.run("wait 0.5")
    assert not office.told()
    office.run("wait 1")
    (line,) = office.told()
    assert line.startswith("watching has been off for 60 min")


def test_a_later_controller_and_agents_that_come_know_it() -> None:
    office = Office()
    off(office)
    again = office.again()
    assert not again.running.standing.is_watched
    assert not again.cases.is_watched
    standing = again.running.standing.message
    effects = office.do_agent("1")
    assert any(getattr(one, "message", None) == standing for one in effects)


def test_a_controller_elsewhere_is_told_by_the_agents() -> None:
    office = Office()
    office.run("found kind=slow rank=0-2 step=42 onset=41 before=0.5 after=1.0")
    office.tell(0, Standing(7, 900.0))
    assert not office.controller.cases.is_watched
    office.run("profiles rank=1 onset=41")
    assert not office.controller.cases.incidents
