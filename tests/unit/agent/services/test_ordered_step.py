"""A step that an operator wants on storage, as a node's agent carries that out."""

from __future__ import annotations

from typing import Any

from keepstep.agent.services.ordered_step import OrderedStep
from keepstep.checkpoint.memory.slots import Key
from keepstep.core.errors import CheckpointError
from keepstep.wire import Persist, Persisting


class States:
    """What two ranks of a node have saved, and the node's board."""

    def __init__(self) -> None:
        self.keys: dict[int, set[Key]] = {0: set(), 1: set()}
        self.ordered: list[Key | None] = []
        self.board: Any = self

    def held(self, rank: int) -> frozenset[Key]:
        return frozenset(self.keys[rank])

    def order(self, key: Key | None) -> None:
        self.ordered.append(key)

    def save(self, step: int) -> None:
        for keys in self.keys.values():
            keys.add(Key(0, step))


class Agent:
    def __init__(self, *, has_storage: bool = True) -> None:
        self.states, self.sent, self.now_s = States(), list[Any](), 100.0
        self.step = OrderedStep(
            self.states,  # type: ignore[arg-type]
            (0, 1),
            0,
            self.sent.append,
            has_storage=has_storage,
            clock=lambda: self.now_s,
        )

    def look(
        self, whole: set[Key] | None = None, wished: dict[Key, set[int]] | None = None, *troubles: str
    ) -> None:
        self.step.look(whole or set(), wished or {}, troubles)

    def last(self) -> Persisting:
        (told,) = self.sent
        self.sent.clear()
        return told


def test_it_waits_for_the_step_of_all_its_ranks_and_tells_when_it_is_there() -> None:
    agent = Agent()
    agent.states.save(9)
    agent.step.take(Persist(5, Key(0, 12).pack()))
    agent.look()
    assert agent.states.ordered == [Key(0, 12)]
    assert agent.last().state == "waits"
    agent.look({Key(0, 8)}, {Key(0, 12): {0}, Key(0, 8): {0, 1}})
    assert not agent.sent
    agent.look(set(), {Key(0, 12): {0, 1}}, "the disk is full")
    told = agent.last()
    assert (told.state, Key.unpack(told.key), told.why) == ("on the way", Key(0, 12), "the disk is full")
    agent.look({Key(0, 12)})
    assert agent.last().state == "there"
    agent.look({Key(0, 12)})
    assert not agent.sent
    agent.step.take(Persist(5, Key(0, 12).pack()))  # the order is repeated, as the answer may be lost
    agent.look({Key(0, 12)})
    assert agent.last().state == "there"
    agent.step.take(Persist(0))
    agent.look()
    assert agent.states.ordered[-1] is None
    assert not agent.sent


def test_a_question_is_answered_with_the_newest_step_and_the_pace() -> None:
    agent = Agent()
    agent.step.take(Persist(5))
    agent.look()
    assert "keepstep.Session or keepstep.checkpoint.save()" in agent.last().why
    agent.states.save(10)
    agent.step.take(Persist(6))
    agent.look()
    assert not agent.sent  # the pace is measured first
    agent.now_s += 2.0
    agent.states.save(30)
    agent.look()
    told = agent.last()
    assert (told.state, Key.unpack(told.key), told.steps_s) == ("ready", Key(0, 30), 10.0)
    agent.now_s += 2.0
    agent.states.save(60)
    agent.look()
    assert not agent.sent
    agent.step.take(Persist(6))
    agent.look()
    assert Key.unpack(agent.last().key) == Key(0, 60)


def test_without_storage_it_says_so() -> None:
    agent = Agent(has_storage=False)
    agent.states.save(3)
    agent.step.take(Persist(5))
    agent.look()
    told = agent.last()
    assert (told.state, "--checkpoint-dir" in told.why) == ("unable", True)


def test_a_board_that_is_gone_is_no_end_of_the_agent() -> None:
    agent = Agent()
    agent.states.save(3)

    def order(key: Key | None) -> None:
        raise CheckpointError("gone")

    agent.states.order = order  # type: ignore[method-assign]
    agent.step.take(Persist(5, Key(0, 4).pack()))
    agent.look()
    assert agent.last().state == "waits"
