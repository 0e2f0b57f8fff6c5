"""A verb asks the controller of its run, and no other that happens to be at that address now."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from keepstep import wire
from keepstep.cli._asking import ask
from keepstep.core.errors import RunError


@contextmanager
def controller(run: Path, run_id: str) -> Iterator[None]:
    """Answers every question; ``run.json`` says that it is the controller of job-a."""
    key = wire.RunKey(wire.write_secret(run / "secret"), run_id)
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        callbacks = wire.ServerCallbacks(
            lambda connection, message: connection.send(wire.Validated(refused="not now")),
            lambda _: None,
            lambda _, __: None,
        )
        server = await wire.serve("127.0.0.1", 0, key, callbacks)
        told = {
            "controller": f"127.0.0.1:{server.port}",
            "secret_file": str(run / "secret"),
            "run_id": "job-a",
        }
        (run / "run.json").write_text(json.dumps(told))
        ready.set()
        await stop.wait()
        await server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def asked(run: Path) -> wire.Validated:
    question = wire.Validate()
    return ask(str(run), question, wire.Validated, 30.0, only="only a job can", gone="ask once more")


def test_the_controller_of_the_run_answers(tmp_path: Path) -> None:
    with controller(tmp_path, "job-a"):
        assert asked(tmp_path) == wire.Validated(refused="not now")


def test_the_controller_of_another_run_is_not_asked(tmp_path: Path) -> None:
    with controller(tmp_path, "job-b"), pytest.raises(RunError) as caught:
        asked(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: its controller is not at 127.0.0.1:")
    assert str(caught.value).endswith(" any more, which runs job 'job-b'; ask once more")
