"""A follower and controllers that answer oddly: whatever comes is shown or told in one line."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.unit.control.test_followed import incident
from tests.unit.control.test_status_writer import job

from keepstep import wire
from keepstep.control.followed import Window
from keepstep.core.errors import RunError
from keepstep.traces import Run
from keepstep.view.follower import Follower
from keepstep.wire.messages import PathRate

Answers = Callable[[wire.Connection, wire.Message], None]


@contextmanager
def controllers(run: Path, *answers: Answers) -> Iterator[list[int]]:
    """Servers of one run that answer so; ``run.json`` names the first. Gives their ports."""
    key = wire.RunKey(wire.write_secret(run / "secret"))
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    ports: list[int] = []

    async def serve() -> None:
        servers: list[wire.Server] = []
        for answer in answers:

            def told(to: wire.Connection, message: wire.Message, answer: Answers = answer) -> None:
                if isinstance(message, wire.Follow):
                    answer(to, message)

            callbacks = wire.ServerCallbacks(told, lambda _: None, lambda _, __: None)
            servers.append(await wire.serve("127.0.0.1", 0, key, callbacks))
        ports.extend(one.port for one in servers)
        content = {"controller": f"127.0.0.1:{ports[0]}", "secret_file": str(run / "secret")}
        (run / "run.json").write_text(json.dumps(content))
        ready.set()
        await stop.wait()
        for one in servers:
            await one.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield ports
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def asked(run: Path) -> Follower:
    follower = Follower(Run(run), 30.0)
    try:
        follower.ask()
    finally:
        follower.close()
    return follower


def test_it_goes_where_the_controller_has_moved_to(tmp_path: Path) -> None:
    def moved(to: wire.Connection, message: wire.Message) -> None:
        to.send(wire.Moved(2, "127.0.0.1", ports[1]))

    here = Window(job(3), "", dict, lambda: 3.0, lambda: 5.0)
    with controllers(tmp_path, moved, lambda to, message: to.send(here.answer(message))) as ports:
        follower = Follower(Run(tmp_path), 30.0)
        assert len(follower.ask().ranks) == 6
        assert len(follower.ask().ranks) == 6  # it stays there
        follower.close()


def test_controllers_that_send_it_round_are_given_up(tmp_path: Path) -> None:
    def moved(to: wire.Connection, message: wire.Message) -> None:
        to.send(wire.Moved(2, "127.0.0.1", ports[0]))

    with controllers(tmp_path, moved) as ports, pytest.raises(RunError, match="every controller says"):
        asked(tmp_path)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (wire.Refused("no\nmore"), r"its controller refuses: no\\nmore$"),
        (wire.Overview("running", 1, 0, 3), "Overview is no answer"),
        (wire.Followed(1.0, b"\x90", b"\x90", b"\x90", next_node=0), "repeats its rows"),
        (wire.Followed(1.0), "an answer that makes no sense"),
        (wire.Followed(1.0, b"\x90", b"\x90", b"\x90", incidents=(b"[]",)), "is no incident of keepstep"),
    ],
)
def test_what_is_no_answer_is_told_in_a_line(tmp_path: Path, answer: wire.Message, told: str) -> None:
    with (
        controllers(tmp_path, lambda to, message: to.send(answer)),
        pytest.raises(RunError, match=told) as caught,
    ):
        asked(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_controller_that_says_nothing(tmp_path: Path) -> None:
    with controllers(tmp_path, lambda to, message: None):
        follower = Follower(Run(tmp_path), 0.2)
        with pytest.raises(RunError, match=r"it says nothing for 0\.2 s"):
            follower.ask()


def test_a_run_that_has_ended_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"controller": "127.0.0.1:1", "secret_file": "x"}')
    (tmp_path / "end.json").write_text("{}")
    with pytest.raises(RunError, match="only a running job can be followed"):
        asked(tmp_path)


def test_damaged_answers_do_no_harm(tmp_path: Path) -> None:
    """Bytes of good answers are changed at random: each is shown, or refused in one line."""
    controller = job(3)
    controller.cases.desk.register.publish(incident(1, "slow"), "")
    path = PathRate("10.0.0.1", "10.0.0.2", "TCP", 1 << 20, 1.0)
    controller.cluster.nodes[1].paths = (path,)
    here, draw = Window(controller, "dp2", dict, lambda: 3.0, lambda: 5.0), random.Random(7)

    def damaged(to: wire.Connection, message: wire.Message) -> None:
        good = here.answer(message)
        assert isinstance(good, wire.Followed)
        name = draw.choice(["nodes", "ranks", "links", "status", "incidents"])
        part = bytearray(good.incidents[0] if name == "incidents" else getattr(good, name))
        for _ in range(draw.randrange(1, 4)):
            part[draw.randrange(len(part))] = draw.randrange(256)
        changed = (bytes(part),) if name == "incidents" else bytes(part)
        to.send(msgspec.structs.replace(good, **{name: changed}, next_node=-1))

    with controllers(tmp_path, damaged):
        said = [why(tmp_path) for _ in range(300)]
    assert said.count("") > 50
    assert len(said) - said.count("") > 50
    assert not any("\n" in line for line in said)


def why(run: Path) -> str:
    """Why there is no answer; "": there is one."""
    try:
        asked(run)
    except RunError as error:
        return str(error)
    return ""
