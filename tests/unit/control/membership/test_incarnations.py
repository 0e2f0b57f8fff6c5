"""A death is of its incarnation: the next one's is another incident, and a restart closes it."""

from __future__ import annotations

from tests.unit.control import control_stand_ins as stand_ins

from keepstep.control.controller import Controller
from keepstep.control.effects import Effect, WriteIncident
from keepstep.control.incidents.crash_case import GATHER_S
from keepstep.control.settings import Settings
from keepstep.core.finding import Finding
from keepstep.core.incident import Incident, Recovery
from keepstep.wire.messages import Found, Hello, Recovered


def crash(rank: int, incarnation: int) -> Found:
    return Found(Finding("crash", rank, "gpu-0", 1.0, -1, exit_code=137, incarnation=incarnation))


def recovered(incarnation: int) -> Recovered:
    return Recovered(0, Recovery(incarnation, 1, "was killed", 0.3, (("ended", 0.3),), 4, 4))


class Job:
    """A launcher's connection to a controller, and the newest word on each incident."""

    def __init__(self, known: dict[int, Incident] | None = None) -> None:
        self.now_s = 0.0
        self.incidents: dict[int, Incident] = dict(known or {})
        self.controller = Controller(
            Settings(), locators=stand_ins.PlainLocators(), unix_s=lambda now_s: now_s
        )
        self.controller.restore(self.incidents.values())
        self.controller.connected(1, "launcher")
        self.hear(Hello("launcher", "gpu-0", 0, 7))

    def hear(self, message: Hello | Found | Recovered, pass_s: float = 0.0) -> None:
        self._note(self.controller.message(1, message, self.now_s))
        if pass_s:
            self.now_s += pass_s
            self._note(self.controller.tick(self.now_s))

    def _note(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, WriteIncident):
                self.incidents[effect.incident.number] = effect.incident

    @property
    def told(self) -> list[tuple[int, str, int | None]]:
        """Incarnation, status, and incarnation recovered to, of each incident."""
        return [
            (one.incarnation, one.status, one.recovery.incarnation if one.recovery else None)
            for _, one in sorted(self.incidents.items())
        ]


def test_the_second_death_of_the_same_rank_is_another_incident() -> None:
    job = Job()
    job.hear(crash(1, 0), GATHER_S)
    job.hear(recovered(1))
    job.hear(crash(1, 1), GATHER_S)
    assert job.told == [(0, "relieved", 1), (1, "open", None)]
    assert job.controller.cases.recovery is not None


def test_a_death_before_training_began_again_is_another_incident() -> None:
    job = Job()
    job.hear(crash(1, 0), GATHER_S)
    job.hear(crash(1, 1), GATHER_S)
    assert job.told == [(0, "ended", None), (1, "open", None)]


def test_a_restart_within_the_first_moment_still_has_its_verdict() -> None:
    job = Job()
    job.hear(crash(1, 0))
    job.hear(recovered(1))
    assert job.told == [(0, "relieved", 1)]
    assert [culprit.rank for culprit in job.incidents[1].culprits] == [1]


def test_what_is_said_late_or_again_changes_nothing() -> None:
    job = Job()
    job.hear(crash(1, 0), GATHER_S)
    job.hear(crash(2, 1), GATHER_S)
    job.hear(crash(1, 0), GATHER_S)
    job.hear(recovered(1))
    assert job.told == [(0, "ended", None), (1, "open", None)]


def test_a_controller_that_begins_anew_goes_on_with_the_open_incident() -> None:
    before = Job()
    before.hear(crash(1, 1), GATHER_S)
    after = Job(before.incidents)
    after.hear(crash(1, 0), GATHER_S)
    after.hear(crash(1, 1), GATHER_S)
    after.hear(recovered(2))
    assert after.told == [(1, "relieved", 2)]
