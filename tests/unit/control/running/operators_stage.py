"""Three nodes with a rank each that train, and an operator's client in front of them."""

from __future__ import annotations

from typing import Any, TypeVar

from tests.scenarios.test_control_scenarios import Stage

from keepstep.control.controller import Controller
from keepstep.control.effects import Effect, Send, StoreStanding, Tell
from keepstep.wire import Hello, Message, Operated, Persist, Standing, Traced, TraceRanks, Tuned

M = TypeVar("M", bound=Message)
KINDS = (Operated, Tuned, Traced, Standing, TraceRanks, Persist)  # what scenarios have no words for


class Office(Stage):
    """A job, to which messages of agents and of an operator come."""

    def __init__(self, line: str = "cluster nodes=3 ranks=1", *, step: int = 40) -> None:
        super().__init__()
        self.effects: list[Effect] = []
        self.run(line)
        self.run(f"beat step={step}")
        self.operator = self.connect("operator", "client")
        self.say(self.operator, Hello("client", "desk", -1, 7))

    def note(self, effect: Effect) -> list[str]:
        self.effects.append(effect)
        is_new = isinstance(effect, StoreStanding | Tell) or (
            isinstance(effect, Send) and isinstance(effect.message, KINDS)
        )
        return [] if is_new else super().note(effect)

    def order(self, message: Message) -> list[Effect]:
        return self.take(self.say(self.operator, message))

    def tell(self, node: int, message: Message) -> list[Effect]:
        return self.take(self.say(self.peer(f"agent{node}"), message))

    def take(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            self.note(effect)
        return effects

    def sent(self, kind: type[M], to: str = "") -> list[M]:
        """What was sent of a kind since this was asked last; forgets everything else."""
        effects, self.effects = self.effects, []
        return [
            one.message
            for one in effects
            if isinstance(one, Send) and isinstance(one.message, kind)
            if not to or any(self.names.get(peer) == to for peer in one.peers)
        ]

    def go_on(self, seconds: int, step: int = 50) -> None:
        """Time passes while agents send heartbeats."""
        for _ in range(seconds):
            self.run(f"beat step={step}")
            self.run("wait 1")

    def answer(self, kind: type[M]) -> M:
        (found,) = self.sent(kind, "operator")
        return found

    def stored(self) -> list[Any]:
        return [one.standing for one in self.effects if isinstance(one, StoreStanding)]

    def told(self) -> list[str]:
        return [one.text for one in self.effects if isinstance(one, Tell)]

    def again(self) -> Controller:
        """Another controller process, with the agents that come back to it."""
        standing = self.controller.running.standing.message
        self.run("restart")
        self.controller.running.standing.restore(standing, self.now_s)
        return self.controller
