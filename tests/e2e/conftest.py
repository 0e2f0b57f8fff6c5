"""Jobs started by these tests must hear signals, also when the tests run in the background or under nohup."""

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.warm.forked import fork_child
from tests.warm.warm_fork import LAUNCHER, ROOM, script_of

WARM = Path(__file__).parents[1] / "warm"

# A shell's background passes on that Ctrl-C is ignored, nohup that SIGHUP is; `keepstep run` respects both.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fork launchers and workers whose scripts use torch off a process that has it: ``tests/warm`` says how.

    Unit tests, which run in the same process and get here, too, see nothing of it.
    """
    if item.get_closest_marker("e2e") is None:
        return (yield)
    path = os.pathsep.join(filter(None, (str(WARM), os.environ.get("PYTHONPATH"))))
    environ = {
        ROOM: "x" * 16_384,
        "PYTHONPATH": path,
        # No CPU is idle beside the other tests.
        "KEEPSTEP_STANDBY_IDLE_S": "0.5",
    }
    with mock.patch.dict(os.environ, environ):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def forked_launchers() -> Iterator[None]:
    """Fork launchers off a zygote, where nothing but their descriptors and folder is asked of their start."""
    patched: Any = subprocess.Popen  # Any: of a private method
    execute = patched._execute_child

    def execute_child(popen, args, executable, preexec_fn, close_fds, pass_fds, *others) -> None:
        folder, environment, pipes, identity = others[0], others[1], others[5:11], others[12:]
        environment = dict(os.environ if environment is None else environment)
        words = [] if isinstance(args, str | bytes) else [os.fsdecode(word) for word in args]
        is_plain = (
            preexec_fn is None and not pass_fds and identity[:3] == (None,) * 3 and not any(identity[4:5])
        )
        is_launcher = words[:1] == [sys.executable] and words[1:4] == LAUNCHER and environment.get(ROOM)
        if not (is_plain and is_launcher and "torch" in script_of(words[4:])):
            return execute(popen, args, executable, preexec_fn, close_fds, pass_fds, *others)
        return fork_child(popen, words, environment, folder, pipes)

    patched._execute_child = execute_child
    yield
    patched._execute_child = execute


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start launchers and workers as users do, an interpreter each."""
    monkeypatch.setenv(ROOM, "")
