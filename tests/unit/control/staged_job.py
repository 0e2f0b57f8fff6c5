"""Launchers and an operator in front of a controller's core, message by message."""

from __future__ import annotations

from tests.unit.control import control_stand_ins as stand_ins

from keepstep.control.controller import Controller
from keepstep.control.effects import Effect, Send, StorePlacement
from keepstep.control.settings import Settings
from keepstep.wire import Halted, Hello, Join, Message, Operate, Operated

OPERATOR = 20


class Stage:
    """``nodes`` launchers, numbered as their peers; an operator's client."""

    def __init__(self, nodes: int = 2, *, restarts: int = 2, missing: int = 0) -> None:
        self.nodes, self.restarts = nodes, restarts
        self.stored: StorePlacement | None = None
        self.stopped: list[tuple[int, ...]] = []
        self.controller = self.fresh()
        for number in range(nodes - missing):
            self.come(number)

    def fresh(self) -> Controller:
        return Controller(Settings(nodes=self.nodes), locators=stand_ins.PlainLocators())

    def come(
        self,
        number: int,
        incarnation: int = -1,
        *,
        hosts_controller: bool = False,
        alike: tuple[str, ...] = (),
    ) -> list[Effect]:
        self.controller.connected(number, "launcher")
        join = Join(
            f"gpu-{number}", f"10.0.0.{number}", 1, 29500, -1, self.nodes, self.nodes, self.restarts, incarnation,
            hosts_controller=hosts_controller, alike=alike,
        )  # fmt: skip
        return self.say(number, Hello("launcher", f"gpu-{number}", -1, 100 + number), join)

    def say(self, peer: int, *messages: Message, now_s: float = 1.0) -> list[Effect]:
        effects = [effect for one in messages for effect in self.controller.message(peer, one, now_s)]
        self.stored = next((one for one in effects[::-1] if isinstance(one, StorePlacement)), self.stored)
        return effects

    def order(self, verb: str, *, now: bool = False) -> list[Effect]:
        self.controller.connected(OPERATOR, "client")
        self.say(OPERATOR, Hello("client", "desk", -1, 1))
        return self.say(OPERATOR, Operate(verb, now))  # type: ignore[arg-type]

    def halt(self, incarnation: int, *, suspended: bool = False) -> list[Effect]:
        return [
            effect
            for number in range(self.nodes)
            for effect in self.say(number, Halted(incarnation, 4000 + number, suspended))
        ]

    def suspend(self) -> None:
        self.order("suspend", now=True)
        self.halt(self.controller.reforming.incarnation, suspended=True)
        assert self.answer(self.tick()).done

    def tick(self, now_s: float = 2.0) -> list[Effect]:
        return self.controller.tick(now_s)

    def answer(self, effects: list[Effect]) -> Operated:
        ((peers, message),) = sent(effects, Operated)
        assert peers == (OPERATOR,)
        assert isinstance(message, Operated)
        return message

    @property
    def state(self) -> str:
        return self.controller.state(2.0).value


def sent(effects: list[Effect], kind: type[Message]) -> list[tuple[tuple[int, ...], Message]]:
    return [
        (one.peers, one.message) for one in effects if isinstance(one, Send) and type(one.message) is kind
    ]
