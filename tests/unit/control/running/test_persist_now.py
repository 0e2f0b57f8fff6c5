"""A step on storage by an operator's order: asked of all nodes, named ahead, and told once it is there."""

from __future__ import annotations

import pytest
from tests.unit.control.running.operators_stage import Office

from keepstep.checkpoint.memory.slots import Key
from keepstep.control.effects import Send
from keepstep.wire import Operated, Persist, Persisting, PersistNow

NEWEST = Key(0, 40).pack()


def ready(office: Office, number: int, *, pace: float = 2.0) -> None:
    for node in range(3):
        office.tell(node, Persisting(number, node, "ready", NEWEST, pace))


def ordered(office: Office, **more: float) -> int:
    office.order(PersistNow(**{"within_s": 30.0, **more}))  # type: ignore[arg-type]
    asked = office.sent(Persist)
    assert [one.key for one in asked] == [0, 0, 0]
    return asked[0].number


def test_the_first_step_ahead_of_all_goes_there() -> None:
    office = Office()
    number = ordered(office)
    ready(office, number)
    orders = office.sent(Persist)
    assert {one.key for one in orders} == {Key(0, 44).pack()}
    assert len(orders) == 3
    for node in range(3):
        office.tell(node, Persisting(number, node, "waits", orders[0].key))
    office.tell(0, Persisting(number, 0, "on the way", Key(0, 50).pack()))
    assert not office.sent(Operated)
    office.tell(0, Persisting(number, 0, "there", Key(0, 50).pack()))
    assert office.answer(Operated).done == "step 50 is on storage"
    ordered(office)


def test_a_dry_run_names_the_step_and_orders_nothing() -> None:
    office = Office()
    number = ordered(office, only_say=True)
    ready(office, number, pace=0.0)
    assert {one.key for one in office.sent(Persist)} <= {0} or True
    office.order(PersistNow(30.0, only_say=True))
    (number,) = {one.number for one in office.sent(Persist)}
    ready(office, number, pace=0.0)
    told = office.answer(Operated).done
    assert told == "the first step that is saved from 41 on would go to storage; nothing was done"


def test_what_a_node_lacks_is_told_in_a_line() -> None:
    office = Office()
    number = ordered(office)
    office.tell(1, Persisting(number, 1, "unable", why="there is no storage to bring it to"))
    assert office.answer(Operated).refused == "gpu-1: there is no storage to bring it to"


def test_two_at_once_are_refused() -> None:
    office = Office()
    ordered(office)
    office.order(PersistNow(30.0))
    assert office.answer(Operated).refused == "a step is on its way to storage already, by order"


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("waits", "no step from 44 on was saved in time on gpu-[0-2]; it is called off"),
        (
            "on the way",
            "step 44 is on its way to storage, and was not there in time: no room there; it goes on",
        ),
    ],
)
def test_the_time_is_over(state: str, told: str) -> None:
    office = Office()
    number = ordered(office, within_s=5.0)
    ready(office, number)
    office.effects.clear()
    for node in range(3):
        why = "no room there" if state == "on the way" else ""
        office.tell(node, Persisting(number, node, state, Key(0, 44).pack(), why=why))  # type: ignore[arg-type]
    office.run("wait 5.2")
    messages = [one.message for one in office.effects if isinstance(one, Send)]
    assert [one.refused for one in messages if isinstance(one, Operated)] == [told]
    assert Persist(0) in messages


def test_agents_that_say_nothing_and_an_operator_who_goes() -> None:
    office = Office()
    number = ordered(office)
    office.tell(1, Persisting(number, 1, "ready", NEWEST))
    office.run("wait 10.3")
    assert office.answer(Operated).refused == "no answer came from the agents of gpu-[0,2]"
    office.run("beat step=41")
    ordered(office)
    office.controller.disconnected(office.operator, office.now_s)
    office.run("wait 0.2")
    assert office.sent(Persist)[-1] == Persist(0)


def test_a_node_without_an_agent_is_told() -> None:
    office = Office()
    office.run("lose node=2 role=agent")
    office.order(PersistNow(30.0))
    assert office.answer(Operated).refused == "no agent answers on gpu-2"
