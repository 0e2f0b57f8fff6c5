"""At warm-up agents probe each other in pairs, and who does not answer twice is told."""

from __future__ import annotations

from collections.abc import Iterable

from tests.unit.control import control_stand_ins as stand_ins

from keepstep.control.controller import Controller
from keepstep.control.effects import Effect, Send, Tell
from keepstep.control.settings import Settings
from keepstep.core.summary import Endpoint, PathProbe
from keepstep.wire.messages import Heartbeat, Hello, Join, Probed, ProbeRequest, RankBeat, Reachable


class Job:
    """The controller's core with nodes of one rank each. ``cut``: pairs of nodes that do not reach each other."""

    def __init__(self, nodes: int, *cut: tuple[int, int]) -> None:
        self.now_s, self.nodes, self.cut = 0.0, nodes, {frozenset(pair) for pair in cut}
        self.told: list[str] = []
        self.asked: list[tuple[int, ProbeRequest]] = []
        self.controller = Controller(Settings(nodes=nodes), locators=stand_ins.PlainLocators())
        for node in range(nodes):
            self.controller.connected(node, "launcher")
            self.say(node, Hello("launcher", f"gpu-{node}", -1, 100 + node))
            self.say(node, Join(f"gpu-{node}", f"10.0.0.{node}", 1, 29500, node, nodes, nodes, 0))
            self.controller.connected(100 + node, "agent")
            self.say(100 + node, Hello("agent", f"gpu-{node}", node, 200 + node))

    def say(self, peer: int, message: object) -> None:
        self.note(self.controller.message(peer, message, self.now_s))  # type: ignore[arg-type]

    def note(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Tell):
                self.told.append(effect.text)
            elif isinstance(effect, Send) and isinstance(effect.message, ProbeRequest):
                self.asked += [(peer, effect.message) for peer in effect.peers]

    def connect(self) -> None:
        for node in range(self.nodes):
            self.say(100 + node, Reachable(node, (Endpoint(f"10.0.0.{node}", 7000),)))

    def wait(self, seconds: float) -> int:
        """Let time pass, agents answering as they can; returns how many probes they made."""
        made = 0
        for tenth in range(round(seconds * 10)):
            self.now_s = round(self.now_s + 0.1, 3)
            if tenth % 10 == 0:
                for node in range(self.nodes):
                    beat = RankBeat(node, 1 + int(self.now_s), 2, 10 * int(1 + self.now_s), 0.5)
                    self.say(100 + node, Heartbeat(node, 1 + int(self.now_s), self.now_s, (beat,)))
            self.note(self.controller.tick(self.now_s))
            asked, self.asked = self.asked, []
            for peer, request in asked:
                here, probes = peer - 100, []
                for target in request.targets:
                    lost = frozenset((here, int(target.node.removeprefix("gpu-")))) in self.cut
                    outcome = "timeout" if lost else "echo"
                    probes.append(PathProbe(f"gpu-{here}", target.node, outcome, 0.001))
                made += len(probes)
                self.say(peer, Probed(request.request, here, tuple(probes)))
        return made


def test_each_node_is_probed_once_with_its_neighbours() -> None:
    job = Job(4)
    assert job.wait(12.0) == 0, "nobody is asked before all are connected"
    job.connect()
    assert job.wait(60.0) == 8, "four pairs, in both directions"
    assert not [text for text in job.told if text.startswith("warm-up")]


def test_who_does_not_answer_twice_is_told_once() -> None:
    job = Job(4, (1, 2))
    job.connect()
    assert job.wait(8.0) == 8
    assert not [text for text in job.told if text.startswith("warm-up")]
    job.wait(60.0)
    assert [text for text in job.told if text.startswith("warm-up")] == [
        "warm-up: link gpu-1 - gpu-2: no data (timeout); both reach other nodes, look at the way between them"
    ]


def test_who_answers_the_second_time_is_not_told() -> None:
    job = Job(4, (1, 2))
    job.connect()
    assert job.wait(8.0) == 8
    job.cut.clear()
    assert job.wait(60.0) == 2
    assert not [text for text in job.told if text.startswith("warm-up")]


def test_a_node_that_none_of_its_partners_reaches_is_named() -> None:
    job = Job(5, (1, 2), (2, 3))
    job.connect()
    job.wait(60.0)
    told = [text for text in job.told if text.startswith("warm-up")]
    assert len(told) == 1, told
    assert "gpu-2" in told[0]
