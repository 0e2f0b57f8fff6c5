"""What the controller makes of messages around a recovery: who is believed, and who is refused."""

from __future__ import annotations

import pytest
from tests.unit.control import control_stand_ins as stand_ins

from keepstep.control.controller import Controller
from keepstep.control.effects import Disconnect, Effect, Send, StoreStop, Tell, WriteIncident
from keepstep.control.settings import Settings
from keepstep.core.finding import Finding
from keepstep.wire import (
    Bye,
    Ended,
    Failed,
    Found,
    Halt,
    Halted,
    Heartbeat,
    Hello,
    Join,
    Kept,
    Message,
    Placement,
    RankBeat,
    Refused,
    Said,
    Seat,
    Stop,
    Words,
)


class Stage:
    """Two nodes that play, ``gpu-2`` as a spare; peers are numbered as their nodes, agents from 10 on."""

    def __init__(self, controller: Controller | None = None) -> None:
        self.controller = controller or Controller(Settings(nodes=2), locators=stand_ins.PlainLocators())
        elects = controller is not None
        for number in range(3):
            self.controller.connected(number, "launcher")
            seat = (
                Seat(number + 1, f"gpu-{number}", 100 + number, f"10.0.0.{number}", 7000) if elects else None
            )
            join = Join(f"gpu-{number}", f"10.0.0.{number}", 1, 29500, -1, 2, 2, 2, seat=seat)
            self.say(number, Hello("launcher", f"gpu-{number}", -1, 100 + number), join)

    def say(self, peer: int, *messages: Message, now_s: float = 1.0) -> list[Effect]:
        return [effect for one in messages for effect in self.controller.message(peer, one, now_s)]

    def begin_again(self) -> list[Effect]:
        self.say(1, Failed(0, 137, "rank 1 died"))
        return self.say(0, Halted(0, 4000)) + self.say(1, Halted(0, 4001))

    def agent(self, number: int, launcher: int) -> list[Effect]:
        self.controller.connected(10 + number, "agent")
        return self.say(10 + number, Hello("agent", f"gpu-{number}", number, 200 + number, launcher=launcher))


def sent(effects: list[Effect], kind: type[Message]) -> list[tuple[tuple[int, ...], Message]]:
    return [
        (one.peers, one.message) for one in effects if isinstance(one, Send) and type(one.message) is kind
    ]


def test_all_begin_again() -> None:
    stage = Stage()
    assert sent(stage.say(1, Failed(0, 137, "rank 1 died")), Halt) == [((0, 1, 2), Halt(0))]
    placed = sent(stage.begin_again(), Placement)
    assert [(peers, one.node_rank, one.incarnation) for peers, one in placed] == [((0,), 0, 1), ((1,), 1, 1)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("restarts", [0, 2])
def test_what_is_read_late_of_the_last_incarnation_is_no_word_of_the_next(restarts: int) -> None:
    controller = Controller(Settings(nodes=1), locators=stand_ins.PlainLocators())

    def say(peer: int, *messages: Message) -> None:
        for one in messages:
            controller.message(peer, one, 10.0)

    def join(incarnation: int) -> Join:
        return Join("gpu-0", "10.0.0.1", 2, 29500, 0, 1, 1, restarts, incarnation)

    controller.connected(0, "launcher")
    say(0, Hello("launcher", "gpu-0", 0, 100), join(0))
    for number in range(2):
        controller.connected(10 + number, "agent")
        say(10 + number, Hello("agent", "gpu-0", 0, 200 + number, number, launcher=100))
    if restarts:
        say(0, Failed(0, 1, "rank 0: ValueError"), Halted(0, 4000))
    else:
        say(0, join(1))
    assert controller.reforming.incarnation == 1
    for number, line in enumerate(("ValueError: bad batch", "KeyError: 'x'")):
        said = Said(number, "py-plain", line, "output", 7, controller.cases.desk.unix_s(10.0))
        say(10 + number, Words(0, (said,), number))
    root = controller.cases.desk.words.failure([], range(2)).root
    assert root is not None
    assert root.line == "KeyError: 'x'"


def test_storage_has_time_to_be_mended() -> None:
    stage = Stage()
    full = Failed(0, 1, "rank 1: OSError: [Errno 28] No space left on device", rank=1, step=5)
    stage.say(1, full)
    told = stage.say(0, Halted(0, 4000)) + stage.say(1, Halted(0, 4001))
    assert sent(told, Placement) == []
    assert [one.text for one in told if isinstance(one, Tell)] == [
        "the job begins again in 5 s, as storage may be mended until then"
    ]
    placed = [bool(sent(stage.controller.tick(now_s / 10), Placement)) for now_s in range(10, 80)]
    assert placed.index(True) == 50


def test_an_end_of_the_incarnation_before_does_not_end_this_one() -> None:
    stage = Stage()
    stage.begin_again()
    for number in range(2):
        assert sent(stage.say(number, Ended(number, 0, "finished", 0)), Stop) == []
    stage.say(0, Ended(0, 0, "finished", 1))
    assert sent(stage.say(1, Ended(1, 0, "finished", 1)), Stop) == [
        ((0, 1, 2), Stop(0, "all nodes have finished"))
    ]


def test_whatever_a_spare_ends_with_ends_nobody_else() -> None:
    stage = Stage()
    assert stage.say(2, Ended(-1, 130, "signal SIGINT")) == []
    stage.say(2, Bye("signal SIGINT"))
    assert stage.controller.rendezvous.spares == []


def test_the_agent_of_a_launcher_that_was_replaced_is_refused() -> None:
    stage = Stage()
    assert sent(stage.agent(1, launcher=101), Refused) == []
    stage.controller.disconnected(1, 2.0)
    stage.say(11, Bye("the launcher is gone", orphaned=True), now_s=2.0)
    stage.controller.tick(2.1)
    stage.say(0, Halted(0, 4000), now_s=2.2)
    stage.say(2, Halted(0, 4002), now_s=2.2)
    stage.controller.tick(2.3)
    assert stage.controller.cluster.nodes[1].name == "gpu-2"
    refused = stage.agent(1, launcher=101)
    assert sent(refused, Refused)
    assert any(isinstance(effect, Disconnect) for effect in refused)


def test_the_job_does_not_run_again_by_the_word_of_agents_of_the_incarnation_before() -> None:
    stage = Stage()

    def beat(numbers: range, incarnation: int, step: int, now_s: float) -> str:
        for node in range(2):
            peer, who = numbers[node], Hello("agent", f"gpu-{node}", node, numbers[node], incarnation)
            if peer not in stage.controller.peers.connected:
                stage.controller.connected(peer, "agent")
                stage.say(peer, who, now_s=now_s)
            stage.say(peer, Heartbeat(node, 1, now_s, (RankBeat(node, step, 1, 1),)), now_s=now_s)
        return stage.controller.state(now_s).value

    old, new = range(10, 12), range(20, 22)
    assert beat(old, 0, 7, 1.0) == "running"
    stage.begin_again()
    assert beat(old, 0, 7, 2.0) == "recovering"
    assert beat(new, 1, -1, 3.0) == "recovering"
    assert beat(new, 1, 7, 4.0) == "running"


@pytest.mark.parametrize("says_so", [False, True])
def test_a_node_that_says_that_it_leaves_was_not_lost(says_so: bool) -> None:
    stage = Stage()
    if says_so:
        stage.say(1, Bye("the pod is ended (SIGTERM from a process outside this container, uid 0)"))
    stage.controller.disconnected(1, 2.0)
    told = [effect for now_s in range(20, 120) for effect in stage.controller.tick(now_s / 10)]
    stage.controller.end(20.0)
    incident = [one.incident for one in told if isinstance(one, WriteIncident)][-1]
    (culprit,) = incident.culprits
    assert incident.cause is not None
    assert (culprit.cause, incident.cause.kind) == (
        ("node left", "left") if says_so else ("node lost", "unreachable")
    )
    assert any("said that it leaves: the pod is ended" in line for line in incident.evidence) == says_so


@pytest.mark.parametrize("unanswered", [False, True])
def test_a_node_that_sent_no_last_packet_has_two_seconds_more(unanswered: bool) -> None:
    stage = Stage()
    stage.controller.disconnected(1, 2.0, unanswered=unanswered)
    told = [bool(sent(stage.controller.tick(now_s / 10), Halt)) for now_s in range(20, 80)]
    assert told.index(True) == (50 if unanswered else 30)


def test_a_node_that_returns_to_a_job_that_is_over_is_told_so() -> None:
    stage = Stage()
    for number in range(2):
        stage.say(number, Ended(number, 0, "finished"))
    stage.controller.connected(7, "launcher")
    join = Join("gpu-7", "10.0.0.7", 1, 29500, -1, 2, 2, 2, 0)
    assert sent(stage.say(7, Hello("launcher", "gpu-7", -1, 107), join), Stop)


def test_an_operators_end_stays_one_under_the_next_controller() -> None:
    stage = Stage()
    stage.say(0, Found(Finding("crash", 0, "gpu-0", 1.0, -1, exit_code=137)))
    told = sent(stage.say(0, Ended(0, 79, "stopped by an operator", by_operator=True)), Stop)
    assert told == [((0, 1, 2), Stop(79, "stopped by an operator", by_operator=True))]
    assert stage.controller.state(1.0).value == "done"


def test_that_all_have_finished_is_told_by_a_leader_that_has_settled_its_council() -> None:
    stage = Stage(Controller(Settings(nodes=2, seat=1, term=1), locators=stand_ins.PlainLocators()))
    council = stage.controller.councils.newest
    assert council is not None
    for number in range(2):
        assert sent(stage.say(number, Ended(number, 0, "finished")), Stop) == []
    told = sent(stage.say(0, Kept(1, council.version)), Stop)
    assert told == [((0, 1, 2), Stop(0, "all nodes have finished"))]


def test_an_end_that_is_not_agreed_on_yet_is_told_though_all_have_ended() -> None:
    """They may have begun again since, or wait for a place: whoever is here ends with what the job ends with."""
    stage = Stage(Controller(Settings(nodes=2, seat=1, term=1), locators=stand_ins.PlainLocators()))
    told = sent(stage.say(1, Ended(1, 79, "stopped by an operator", by_operator=True)), Stop)
    told += sent(stage.say(0, Ended(0, 0, "finished")), Stop)
    assert told == []
    for _ in range(4):  # what was proposed first, then the end
        council = stage.controller.councils.newest
        assert council is not None
        for number in range(2):
            told += sent(stage.say(number, Kept(1, council.version)), Stop)
        told += sent(stage.controller.tick(2.0), Stop)
    assert told == [((0, 1, 2), Stop(79, "stopped by an operator", by_operator=True))]
    assert stage.controller.ending.over


def test_a_controller_that_slept_does_not_take_that_for_a_lost_quorum() -> None:
    stage = Stage(Controller(Settings(nodes=2, seat=1, term=1), locators=stand_ins.PlainLocators()))
    asleep_s, awake_s = 2000.0, 700.0
    assert sent(stage.controller.tick(2.0), Stop) == []
    effects = [*stage.controller.tick(asleep_s), *stage.controller.tick(asleep_s + 0.1)]
    assert sent(effects, Stop) == []
    effects = [
        one for tenth in range(int(awake_s * 10)) for one in stage.controller.tick(asleep_s + tenth / 10)
    ]
    assert [message.exit_code for _, message in sent(effects, Stop) if isinstance(message, Stop)] == [1]


def test_a_controller_that_is_started_anew_knows_that_all_have_finished() -> None:
    stage = Stage()
    effects = [effect for number in range(2) for effect in stage.say(number, Ended(number, 0, "finished"))]
    (stored,) = [one.stop for one in effects if isinstance(one, StoreStop)]
    again = Controller(Settings(nodes=2), locators=stand_ins.PlainLocators())
    again.restore((), (("gpu-1", 101, Placement(1, 1, 2, 2, "10.0.0.0", 29500)),), stored)
    again.connected(1, "launcher")
    again.message(1, Hello("launcher", "gpu-1", 1, 101), 1.0)
    join = Join("gpu-1", "10.0.0.1", 1, 29500, 1, 2, 2, 2, 0)
    assert sent(again.message(1, join, 1.0), Stop) == [((1,), Stop(0, "all nodes have finished"))]
