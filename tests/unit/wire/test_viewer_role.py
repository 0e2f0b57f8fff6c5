"""A viewer can only look: every other message of its role is refused, and none of a node's reaches a viewer."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest

from keepstep import wire
from keepstep.wire.channel import LIMITS
from keepstep.wire.messages import ToController, ToNode, ToViewer, ViewerMessage

MAY = {one.__name__ for one in get_args(ViewerMessage)}
MUST_NOT = sorted({one.__name__ for one in get_args(ToController)} - MAY)
NEVER_HEARD = sorted(
    {one.__name__ for one in get_args(ToNode)} - {one.__name__ for one in get_args(ToViewer)}
)
KEY = wire.RunKey(b"s" * 32)


def connected() -> tuple[wire.ClientChannel, wire.ServerChannel]:
    viewer = wire.ClientChannel(KEY, "viewer", wire.Ends("a:1", "b:2"))
    controller = wire.ServerChannel(KEY, wire.Ends("b:2", "a:1"))
    _, challenge = controller.receive(viewer.open())
    _, proof = viewer.receive(challenge)
    controller.receive(proof)
    return viewer, controller


def test_what_a_viewer_may_say() -> None:
    assert {"Hello", "Look", "Follow", "Bye"} == MAY
    viewer, controller = connected()
    for message in (wire.Hello("viewer", "n", -1, 1), wire.Look(), wire.Follow(3, 5, 7, True), wire.Bye("")):
        assert controller.receive(viewer.send(message)) == ([message], b"")


@pytest.mark.parametrize("name", MUST_NOT)
def test_every_other_message_is_refused(name: str) -> None:
    viewer, controller = connected()
    with pytest.raises(wire.Violation, match="no message that a peer of role viewer may send: Invalid value"):
        controller.receive(viewer.send_encoded(msgspec.msgpack.encode([name])))


@pytest.mark.parametrize(
    "name", sorted({one.__name__ for one in get_args(ToNode)} - {one.__name__ for one in get_args(ToViewer)})
)
def test_no_order_reaches_a_viewer(name: str) -> None:
    viewer, controller = connected()
    with pytest.raises(wire.Violation, match="Invalid value"):
        viewer.receive(controller.send_encoded(msgspec.msgpack.encode([name])))


@pytest.mark.parametrize("fields", [[-1], [0, 0], [0, None, -1], [0, 1 << 62], ["x"], [0, None, 0, 2]])
def test_questions_out_of_bounds_are_refused(fields: list[Any]) -> None:
    viewer, controller = connected()
    with pytest.raises(wire.Violation, match="no message"):
        controller.receive(viewer.send_encoded(msgspec.msgpack.encode(["Follow", *fields])))


def test_a_viewer_may_say_little() -> None:
    viewer, controller = connected()
    with pytest.raises(wire.Violation, match="at most"):
        controller.receive(viewer.send(wire.Bye("x" * LIMITS["viewer"])))
