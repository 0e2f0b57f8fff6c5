"""Crashes at the controller: who is asked, how long is waited, and when deaths belong to a hang."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace

import pytest
from tests.unit.control import control_stand_ins as stand_ins

from keepstep.control.controller import Controller
from keepstep.control.effects import Effect, Say, Send, WriteIncident
from keepstep.control.incidents.crash_case import GATHER_S
from keepstep.control.incidents.locators import Locators
from keepstep.control.settings import Settings
from keepstep.core.finding import Finding
from keepstep.core.incident import Incident, Recovery
from keepstep.core.summary import Endpoint, PathProbe, RankState
from keepstep.wire import (
    Ended,
    Found,
    Heartbeat,
    Hello,
    Join,
    Kill,
    Probed,
    ProbeRequest,
    RankBeat,
    Reachable,
    Recovered,
    StateRequest,
    States,
)

TIMED_OUT = "RuntimeError: Timed out waiting 6000ms for recv operation to complete"
LOST = "RuntimeError: Connection closed by peer"
NODES, RANKS = 2, 2


class Job:
    """The controller's core with two nodes of two ranks; rank 1 never enters the collective."""

    def __init__(self, *, restarts: int = 0, locators: Locators | None = None) -> None:
        self.now_s = 0.0
        self.written: dict[int, Incident] = {}
        self.said: list[Say] = []
        self.asked: list[tuple[tuple[int, ...], StateRequest]] = []
        self.kills: list[Kill] = []
        self.probes: dict[int, ProbeRequest] = {}
        settings = Settings(
            nodes=NODES, restart_hangs=restarts > 0, max_restarts=restarts, hang_patience_s=5.0
        )
        self.controller = Controller(settings, locators=locators or stand_ins.PlainLocators())
        for node in range(NODES):
            self.controller.connected(node, "launcher")
            self.say(node, Hello("launcher", f"gpu-{node}", -1, 100 + node))
            join = Join(f"gpu-{node}", f"10.0.0.{node}", RANKS, 29500, node, NODES, NODES, restarts)
            self.say(node, join)
            self.controller.connected(10 + node, "agent")
            self.say(10 + node, Hello("agent", f"gpu-{node}", node, 200 + node))
        self.beat(39)

    def beat(self, step: int) -> None:
        for node in range(NODES):
            ranks = tuple(RankBeat(rank, step, 2, 100, 0.5) for rank in self.ranks(node))
            self.say(10 + node, Heartbeat(node, 1, self.now_s, ranks))

    @staticmethod
    def ranks(node: int) -> range:
        return range(node * RANKS, (node + 1) * RANKS)

    def say(self, peer: int, message: object) -> None:
        self.note(self.controller.message(peer, message, self.now_s))  # type: ignore[arg-type]

    def note(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, WriteIncident):
                self.written[effect.incident.number] = effect.incident
            elif isinstance(effect, Say):
                self.said.append(effect)
            elif isinstance(effect, Send) and isinstance(effect.message, StateRequest):
                self.asked.append((effect.peers, effect.message))
            elif isinstance(effect, Send) and isinstance(effect.message, Kill):
                self.kills.append(effect.message)
            elif isinstance(effect, Send) and isinstance(effect.message, ProbeRequest):
                self.probes.update(dict.fromkeys(effect.peers, effect.message))

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now_s = round(self.now_s + 0.1, 3)
            self.note(self.controller.tick(self.now_s))

    def dies(self, rank: int, message: str = "", code: int = 1, incarnation: int = 0) -> None:
        finding = Finding(
            "crash", rank, f"gpu-{rank // RANKS}", self.now_s, -1, exit_code=code, message=message,
            incarnation=incarnation,
        )  # fmt: skip
        self.say(rank // RANKS, Found(finding))

    def loses(self, node: int) -> None:
        """Agent and launcher of a node are gone."""
        for peer in (10 + node, node):
            self.note(self.controller.disconnected(peer, self.now_s))

    def leaves(self, rank: int) -> None:
        self.say(rank // RANKS, Found(Finding("exit", rank, f"gpu-{rank // RANKS}", self.now_s, -1)))

    def answer(self, *, idle_s: float = 6.0, nodes: Iterable[int] = range(NODES), **known: object) -> None:
        """Answer the last question: rank 1 is in no operation, the others are in one."""
        _, request = self.asked[-1]
        for node in nodes:
            states = tuple(
                replace(self.state(rank, idle_s), **known)
                for rank in self.ranks(node)  # type: ignore[arg-type]
            )
            self.say(10 + node, States(request.request, node, states))

    def state(self, rank: int, idle_s: float) -> RankState:
        return stand_ins.state(rank, self.now_s, step=44, idle_s=idle_s, waits=rank != 1)

    def hangs(self) -> None:
        self.now_s = 60.0
        self.beat(39)
        for rank in range(NODES * RANKS):
            finding = Finding(
                "hang", rank, f"gpu-{rank // RANKS}", self.now_s, 39, stuck_s=20.0, limit_s=19.0
            )
            self.say(10 + rank // RANKS, Found(finding))
        self.answer(idle_s=20.0)
        assert [(one.number, one.kind, one.status) for one in self.written.values()] == [(1, "hang", "open")]

    @property
    def only(self) -> Incident:
        (incident,) = self.written.values()
        return incident


def blamed(incident: Incident) -> list[tuple[int | None, str]]:
    return [(one.rank, one.cause) for one in incident.culprits]


def test_all_agents_are_asked_when_the_first_death_only_tells_of_others() -> None:
    job = Job()
    job.dies(0, TIMED_OUT)
    job.dies(2, TIMED_OUT)
    assert [(peers, asked.devices) for peers, asked in job.asked] == [((10, 11), True)]
    job.wait(GATHER_S + 0.1)
    assert not job.written  # the answers are waited for
    job.answer(alive=False)
    job.wait(0.1)
    assert (job.only.kind, blamed(job.only)) == ("crash", [(1, "never entered")])
    assert job.only.onset_step == 45  # by the ring; the last heartbeat told 39


def test_of_a_rank_that_died_of_its_own_doing_only_its_node_is_asked_and_not_waited_for() -> None:
    job = Job()
    job.dies(2, "ValueError: bad batch")
    job.dies(0, TIMED_OUT)
    assert [(peers, asked.devices) for peers, asked in job.asked] == [((11,), False)]
    job.wait(GATHER_S)
    assert blamed(job.only) == [(2, "process died")]
    assert job.only.onset_step == 40
    job.answer(nodes=[1])
    job.wait(2.1)
    assert job.only.onset_step == 45


def stuck(rank: int, now_s: float, incarnation: int) -> Found:
    where = f"gpu-{rank // RANKS}"
    known = {"stuck_s": 32.0, "limit_s": 30.0, "incarnation": incarnation}
    return Found(Finding("hang", rank, where, now_s, -1, **known))  # type: ignore[arg-type]


@pytest.mark.parametrize("incarnation", [0, 1])
def test_a_hang_after_the_restart_is_another_incident_and_one_before_is_not(incarnation: int) -> None:
    job = Job()
    job.dies(2, "ValueError: bad batch")
    job.wait(GATHER_S + 2.0)
    for rank in range(NODES * RANKS):
        job.say(10 + rank // RANKS, stuck(rank, job.now_s, incarnation))
    job.wait(0.1)
    if incarnation:
        job.answer(idle_s=32.0)
    assert [one.kind for one in job.written.values()] == ["crash", "hang"][: 1 + incarnation]
    assert [one.status for one in job.written.values()] == ["open"] * (1 + incarnation)


def test_the_step_of_a_death_that_no_agent_knows_is_the_launchers_or_the_jobs_newest() -> None:
    for step in (18, -1):
        job = Job()
        job.beat(-1)
        where = {"exit_code": 137, "incarnation": 1}
        job.say(1, Found(Finding("crash", 2, "gpu-1", job.now_s, step, **where)))  # type: ignore[arg-type]
        job.wait(GATHER_S)
        assert job.only.detected_step == (step if step >= 0 else 39)


def test_agents_that_do_not_answer_are_waited_for_a_second() -> None:
    job = Job()
    job.dies(0, TIMED_OUT)
    job.wait(0.9)
    assert not job.written
    job.wait(0.3)
    assert blamed(job.only) == []
    assert job.only.missing


def test_an_own_death_that_is_told_late_sharpens_the_verdict() -> None:
    job = Job()
    job.dies(0, TIMED_OUT)
    job.wait(1.2)
    assert blamed(job.only) == []
    job.dies(2, "ValueError: bad batch")
    job.wait(2.1)
    assert blamed(job.only) == [(2, "process died")]
    assert [say.what for say in job.said] == ["verdict", "sharper"]


def test_after_lost_connections_the_end_of_who_closed_them_is_waited_for() -> None:
    job = Job()
    job.dies(0, LOST)
    job.answer()
    job.wait(2.0)
    assert not job.written
    job.leaves(1)
    job.leaves(3)
    job.wait(0.3)
    assert blamed(job.only) == [(1, "left with exit code 0"), (3, "left with exit code 0")]


def test_a_node_that_is_gone_is_waited_for_where_the_deaths_only_tell_of_others() -> None:
    """Else the verdict blames one of those that lost their connections, while the node that closed them is gone."""
    job = Job(restarts=1)
    job.loses(1)
    job.dies(0, LOST)
    job.answer(nodes=[0])
    job.wait(2.9)
    assert not job.written
    job.wait(0.5)
    assert [(one.node, one.cause) for one in job.only.culprits] == [("gpu-1", "node lost")]
    assert [say.what for say in job.said if say.what in ("verdict", "sharper")] == ["verdict"]


def test_a_node_that_is_back_is_waited_for_no_longer() -> None:
    job = Job(restarts=1)
    job.loses(1)
    job.dies(0, LOST)
    job.answer(nodes=[0])
    job.wait(2.6)
    job.controller.connected(11, "agent")
    job.say(11, Hello("agent", "gpu-1", 1, 201))
    job.wait(0.3)
    assert job.written


@pytest.mark.parametrize("incarnation", [1, 7])
def test_states_of_another_incarnation_tell_nothing(incarnation: int) -> None:
    job = Job()
    job.dies(0, TIMED_OUT)
    job.answer(incarnation=incarnation)
    job.wait(1.2)
    assert blamed(job.only) == []


def test_what_is_done_before_the_verdict_is_in_the_incident() -> None:
    job = Job()
    job.dies(0, TIMED_OUT)
    job.say(0, Ended(0, 1, "rank 0 failed"))
    assert not job.written
    job.answer()
    job.wait(0.3)
    assert [action.name for action in job.only.actions] == ["stop the job"]


def test_a_hang_and_the_deaths_of_those_who_waited_are_one_incident() -> None:
    job = Job()
    job.hangs()
    job.now_s = 110.0
    job.dies(0, TIMED_OUT)
    job.answer(idle_s=50.0, alive=False)
    job.wait(0.3)
    job.dies(2, LOST)
    job.wait(3.0)
    incident = job.only
    assert (incident.kind, incident.status, blamed(incident)) == ("hang", "open", [(1, "never entered")])
    assert incident.evidence[0] == f"rank 0 gave up waiting: {TIMED_OUT}"
    assert [event.what for event in incident.events] == ["noticed", "verdict", "deaths"]
    assert [one.confidence for one in incident.culprits] == ["high"]
    assert incident.stuck_s == pytest.approx(70.0, abs=1.0)
    assert 1 not in incident.victims
    assert [say.what for say in job.said] == ["verdict", "sharper"]
    job.say(0, Ended(0, 1, "rank 0 failed"))
    job.say(1, Ended(1, 1, "rank 2 failed"))
    job.wait(2.0)
    assert job.only.status == "ended"


def test_a_death_of_its_own_after_a_hang_is_an_incident_of_its_own() -> None:
    job = Job()
    job.hangs()
    job.now_s = 90.0
    job.dies(1, code=137)
    job.wait(GATHER_S)
    hang, crash = job.written.values()
    assert (hang.kind, hang.status) == ("hang", "ended")
    assert (crash.kind, blamed(crash)) == ("crash", [(1, "process died")])


def test_the_end_of_a_rank_that_keepstep_ended_belongs_to_the_hang() -> None:
    job = Job(restarts=2)
    job.hangs()
    hang = job.controller.cases._open.hang  # pyright: ignore[reportPrivateUsage]
    assert hang is not None
    hang.ended.add(1)  # as an order to the launcher does
    job.now_s = 95.0
    job.dies(1, "it hung: nothing of it has moved for 35 s", 137)
    job.dies(0, LOST)
    job.wait(0.5)
    assert (job.only.kind, job.only.status) == ("hang", "open")
    assert job.only.evidence[0] == "rank 1 was ended; rank 0 lost its connection"
    recovery = Recovery(1, 1, "was killed", 3.2, (("ended", 3.2),), 0, 4)
    job.say(0, Recovered(0, recovery))
    assert (job.only.status, job.only.recovery) == ("relieved", recovery)
    assert blamed(job.only) == [(1, "never entered")]


def test_a_crash_that_is_heard_of_after_the_recovery_is_over() -> None:
    """Else it would stay open, and no hang would be looked for meanwhile."""
    job = Job(restarts=2)
    recovery = Recovery(1, 1, "was killed", 3.2, (("ended", 3.2),), 0, 4)
    job.say(0, Recovered(0, recovery))
    job.dies(1, code=137)
    job.wait(6.0)
    assert (job.only.kind, job.only.status, job.only.recovery) == ("crash", "relieved", recovery)


def test_deaths_that_end_a_hang_are_restored_with_it() -> None:
    job = Job()
    job.hangs()
    job.now_s = 110.0
    job.dies(0, TIMED_OUT)
    job.wait(1.2)
    later = Job()
    later.controller.restore(job.written.values())
    later.dies(0, TIMED_OUT)
    later.dies(2, TIMED_OUT)
    later.answer(alive=False)
    later.wait(3.0)
    (incident,) = later.written.values()
    assert (incident.number, incident.kind) == (1, "hang")
    assert incident.victims == (0, 2)


def test_a_rank_that_has_left_is_no_incident_until_others_die_of_it() -> None:
    job = Job()
    job.leaves(1)
    job.wait(5.0)
    assert not job.written
    job.dies(0, LOST)
    job.answer()
    job.wait(0.3)
    assert blamed(job.only) == [(1, "left with exit code 0")]


def test_a_rank_that_is_told_late_to_have_left_sharpens_the_verdict() -> None:
    job = Job()
    job.dies(0, LOST)
    job.wait(2.6)
    assert blamed(job.only) == []
    job.leaves(1)
    job.wait(2.1)
    assert blamed(job.only) == [(1, "left with exit code 0")]
    assert [say.what for say in job.said] == ["verdict", "sharper"]


def test_who_left_in_an_earlier_incarnation_is_forgotten() -> None:
    job = Job()
    job.leaves(1)
    job.dies(0, LOST, incarnation=1)
    job.answer(incarnation=1)
    job.wait(2.6)
    assert [cause for _, cause in blamed(job.only)] == ["never entered"]


def test_a_node_whose_ranks_have_all_ended_well_has_left() -> None:
    job = Job()
    job.say(0, Ended(0, 0))
    assert sorted(job.controller.cluster.left) == [0, 1]
    job.controller.cluster.begin_again({})
    assert not job.controller.cluster.left


def test_the_verdict_comes_before_the_next_incarnation_begins() -> None:
    """What the ranks were in, and who has left, is forgotten then."""
    job = Job()
    job.dies(0, LOST)
    job.answer()
    job.wait(0.5)
    job.leaves(1)
    join = Join("gpu-0", "10.0.0.0", RANKS, 29500, 0, NODES, NODES, 0, 1)
    job.say(0, join)
    assert not job.controller.cluster.left
    assert blamed(job.only) == [(1, "left with exit code 0")]


UNROUTED = "RuntimeError: [enforce fail] connect: No route to host"


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        ("echo", "probed after it: the agents of 2 nodes reach each other, in 1 pair"),
        (
            "timeout",
            "probed after it: link gpu-0 - gpu-1: no data (timeout); nothing says which of the two is at fault",
        ),
    ],
)
def test_pairs_of_nodes_are_probed_once_after_a_failure_of_the_network(outcome: str, told: str) -> None:
    job = Job(restarts=1)
    for node in range(NODES):
        job.say(10 + node, Reachable(node, (Endpoint(f"10.0.0.{node}", 7000),)))
    job.dies(1, UNROUTED)
    for _ in range(6):  # agents that are heard of are asked
        job.beat(39)
        job.wait(0.5)
    before = job.only
    assert before.cause is not None
    assert before.cause.cause_class == "network"
    assert sorted(job.probes) == [10, 11]
    assert all(request.load_bytes == 0 for request in job.probes.values())
    for node, (peer, request) in enumerate(sorted(job.probes.items())):
        probes = (PathProbe(f"gpu-{node}", f"gpu-{1 - node}", outcome, 0.001),)
        job.say(peer, Probed(request.request, node, probes))
    assert job.only.evidence == (*before.evidence, told)
    assert job.only.culprits == before.culprits  # nobody is blamed for it
    job.probes.clear()
    job.dies(0, UNROUTED)
    job.wait(3.0)
    assert job.probes == {}
    assert job.only.evidence.count(told) == 1


def test_no_pairs_are_probed_after_other_failures() -> None:
    job = Job()
    for node in range(NODES):
        job.say(10 + node, Reachable(node, (Endpoint(f"10.0.0.{node}", 7000),)))
    job.dies(1, "KeyError: 'x'")
    job.wait(GATHER_S + 0.1)
    assert len(job.written) == 1
    assert job.probes == {}


def test_ranks_that_were_sent_a_signal_at_once_name_nobody_and_say_so() -> None:
    job = Job(locators=Locators())
    for rank in range(NODES * RANKS):
        job.dies(rank, code=128 + signal.SIGTERM)
    job.wait(GATHER_S + 12.0)
    assert job.only.culprits == ()
    assert job.only.cause is not None
    assert (job.only.cause.cause_class, job.only.cause.kind) == ("other", "signalled")


def test_one_rank_that_was_sent_a_signal_is_named_and_no_scheduler() -> None:
    job = Job(locators=Locators())
    job.dies(1, code=128 + signal.SIGTERM)
    job.dies(0, LOST)
    job.wait(GATHER_S + 12.0)
    assert [culprit.rank for culprit in job.only.culprits] == [1]
    assert job.only.cause is None or job.only.cause.kind != "signalled"
