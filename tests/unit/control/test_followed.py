"""What viewers are shown: every node once however many there are, and each change of an incident once."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.unit.control.test_status_writer import job

from keepstep import wire
from keepstep.checkpoint.memory.slots import Key
from keepstep.control.controller import Controller
from keepstep.control.followed import Window
from keepstep.control.settings import Settings
from keepstep.core.incident import Incident
from keepstep.report.incidents import incident_from_json
from keepstep.wire.channel import SERVER_LIMIT
from keepstep.wire.messages import Inventory, KeptSteps, PathRate, RankKeys


def window(controller: Controller) -> Window:
    return Window(controller, "dp2", lambda: {"messages_in": 3}, lambda: 3.0, lambda: 5.0)


def answered(shown: Window, question: wire.Follow) -> wire.Followed:
    answer = shown.answer(question)
    assert isinstance(answer, wire.Followed)
    assert len(wire.encode(answer)) < SERVER_LIMIT
    return answer


def pages(shown: Window, *, with_links: bool = False) -> list[wire.Followed]:
    found = [answered(shown, wire.Follow(with_links=with_links))]
    while found[-1].next_node >= 0:
        found.append(answered(shown, wire.Follow(found[-1].next_node, with_links=with_links)))
    return found


def joined(found: list[wire.Followed], part: str) -> list[Any]:
    return [row for page in found for row in msgspec.msgpack.decode(getattr(page, part))]


def beat(controller: Controller, node: int, **more: Any) -> None:
    ranks = (wire.RankBeat(2 * node, node, 2, 7), wire.RankBeat(2 * node + 1, node, 2, 7))
    controller.message(node, wire.Heartbeat(node, 1, 1.0, more.pop("ranks", ranks), **more), 2.5)


def test_every_node_is_told_once() -> None:
    controller = job(2600)
    del controller.cluster.nodes[1500]
    found = pages(window(controller))
    told = [node for node in range(2600) if node != 1500]
    assert [row["node_rank"] for row in joined(found, "nodes")] == told
    rows = joined(found, "ranks")
    assert [(node, [cells[0] for cells in ranks]) for node, ranks in rows] == [
        (node, [2 * node, 2 * node + 1]) for node in told
    ]
    assert joined(found, "links") == []
    status = [msgspec.msgpack.decode(page.status) for page in found if page.status]
    assert [(one["world_size"], one["nodes"], one["counters"]["messages_in"]) for one in status] == [
        (5200, [], 3)
    ]
    assert {(page.unix_s, page.layout) for page in found} == {(5.0, "dp2")}


def test_nobody_has_been_heard_of() -> None:
    (page,) = pages(window(Controller(Settings())))
    assert joined([page], "nodes") == []
    assert msgspec.msgpack.decode(page.status)["newest_step"] == -1
    (beyond,) = pages(window(job(2)))[-1:]
    assert beyond.next_node == -1
    assert joined([answered(window(job(2)), wire.Follow(1 << 30))], "nodes") == []


def test_rows_that_are_too_many_to_be_true_are_left_out() -> None:
    controller = job(40)
    many = tuple(wire.RankBeat(number, 1, 2, 7) for number in range(60_000))
    some = tuple(wire.RankBeat(number, 1, 2, 7) for number in range(15_000))
    beat(controller, 3, ranks=many)
    for node in range(10, 40):
        beat(controller, node, ranks=some)
    found = pages(window(controller))
    assert len(found) > 3  # a page ends where it is long
    rows = dict(joined(found, "ranks"))
    assert (len(rows), len(rows[3]), len(rows[2]), len(rows[39])) == (40, 0, 2, 15_000)


def test_what_checks_have_found_is_left_out_where_it_is_very_much() -> None:
    controller = job(1)
    for nodes, told in ((10, 10), (2000, 0)):
        controller.admission.found = {f"n{node}": ("x" * 400,) * 8 for node in range(nodes)}
        status = msgspec.msgpack.decode(answered(window(controller), wire.Follow()).status)
        assert len(status["checks"]) == told


def test_links_are_told_if_asked_for_and_few_of_large_jobs() -> None:
    told = tuple(PathRate("10.0.0.1", f"10.0.0.{number}", "TCP", 9.0, 1.0) for number in range(20))
    for nodes, most in ((2, 20), (1100, 8)):
        controller = job(nodes)
        beat(controller, 1, paths=told)
        beat(controller, 1)  # one without paths says nothing new of them
        rows = dict(joined(pages(window(controller), with_links=True), "links"))
        assert [len(rows[node]) for node in (0, 1)] == [0, most]
        assert rows[1][0] == msgspec.to_builtins(told[0])


def test_which_steps_are_kept() -> None:
    controller = Controller(Settings(nodes=2, backups=1))
    for node in (0, 1):
        controller.connected(node, "agent")
        controller.message(node, wire.Hello("agent", f"n{node}", node, 1), 1.0)
        beat(controller, node)
    keys = [Key(0, step).pack() for step in range(10)]
    own = (RankKeys(0, (keys[6], keys[7])), RankKeys(1, (keys[7], keys[6], keys[5])))
    controller.message(0, Inventory(0, own, ()), 2.0)
    held = (RankKeys(0, (keys[4], keys[5])), RankKeys(1, (keys[4],)))
    controller.message(1, Inventory(1, (), held), 2.0)
    beat(controller, 1, kept=KeptSteps(3, 2, ("full",)))
    beat(controller, 1)
    rows = joined(pages(window(controller)), "nodes")
    steps = [(row["sealed_step"], row["backed_up_step"], row["stored_step"]) for row in rows]
    assert steps == [(7, 4, -1), (3, -1, 2)]
    assert rows[1]["storage_troubles"] == ["full"]


def test_each_change_of_an_incident_is_told_once() -> None:
    controller = job(1)
    register, shown = controller.cases.desk.register, window(controller)
    register.publish(incident(1, "slow"), "")
    register.publish(incident(2, "hang"), "")
    first = answered(shown, wire.Follow())
    assert numbers(first) == [1, 2]
    register.publish(incident(1, "slow", status="relieved"), "")
    register.publish(incident(3, "slow"), "")
    second = answered(shown, wire.Follow(0, first.register, first.version))
    assert numbers(second) == [1, 3]
    assert numbers(answered(shown, wire.Follow(0, second.register, second.version))) == []
    again = answered(window(controller), wire.Follow(0, second.register, second.version))
    assert numbers(again) == [2, 1, 3]  # another controller's versions mean nothing to this one


def test_long_incidents_come_in_several_answers() -> None:
    controller = job(1)
    register, shown = controller.cases.desk.register, window(controller)
    for number in range(1, 101):
        long = ("x" * 1000,) * (300 if number < 98 else 5000)
        register.publish(incident(number, "slow", evidence=long), "")
    seen: list[int] = []
    answer = answered(shown, wire.Follow())
    seen += numbers(answer)
    while answer.more_incidents:
        answer = answered(shown, wire.Follow(0, answer.register, answer.version))
        seen += numbers(answer)
    assert seen == list(range(37, 98))  # the last 64, without those that are longer than an answer may be


def incident(number: int, kind: Any, **more: Any) -> Incident:
    fields: dict[str, Any] = {"culprits": (), "victims": (), "evidence": (), "missing": ()} | more
    return Incident(number, kind, 3, 4, None, 1.5, **fields)


def numbers(answer: wire.Followed) -> list[int]:
    return [incident_from_json(one).number for one in answer.incidents]
