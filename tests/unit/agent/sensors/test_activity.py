"""What real processes do while they make no progress: asleep, computing, with a child that works, sending, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from keepstep.agent.sensors import activity
from keepstep.agent.sensors.activity import ActivitySensor, Suspect, python_frames
from keepstep.agent.sensors.processes import ProcessId, identify
from keepstep.core.summary import How, Stillness

PATIENCE_S = 60.0

SLEEP = "import time; print(1, flush=True); time.sleep(600)"
SPIN = "print(1, flush=True)\nwhile True: pass"
CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"
SEND = """
import socket, threading, time
store = socket.create_server(("127.0.0.1", 0))
def receive():
    connection, _ = store.accept()
    while connection.recv(2000): time.sleep(0.05)
threading.Thread(target=receive, daemon=True).start()
end = socket.create_connection(store.getsockname())
print(1, flush=True)
while True: end.send(bytes(1000)); time.sleep(0.05)
"""
POLL = """
import queue, time
def wait_for_batch(batches):
    while True:
        try: return batches.get(timeout=0.7)
        except queue.Empty: continue
print(1, flush=True)
wait_for_batch(queue.Queue())
"""


@contextmanager
def running(script: str) -> Iterator[ProcessId]:
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        found = identify(process.pid)
        assert found is not None
        yield found
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def watch(process: ProcessId, wanted: How, looks: int = 4) -> list[Stillness]:
    """What is judged from look to look, until ``wanted`` was judged so many times in a row."""
    sensor, seen = ActivitySensor(), list[Stillness]()
    suspects = {0: Suspect(process, (process.pid,), 1)}
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        sensor.look(time.monotonic(), suspects)
        found = sensor.stillness(0)
        if found is not None and (not seen or found is not seen[-1]):
            seen.append(found)
            if len(seen) > looks and {one.how for one in seen[-looks:]} == {wanted}:
                return seen
        time.sleep(0.02)
    raise AssertionError(seen)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_EVERY_S", 0.5)


@pytest.mark.parametrize(
    ("script", "how", "words"),
    [
        (SLEEP, "still", ""),
        (CHILD, "moves", "child processes"),
        (SEND, "moves", "sends"),
    ],
)
def test_what_a_process_does(script: str, how: How, words: str) -> None:
    with running(script) as process:
        assert words in watch(process, how)[-1].why


@pytest.mark.skipif(activity.py_spy() is None, reason="needs py-spy")
def test_a_thread_that_spins_keeps_to_one_function() -> None:
    with running(SPIN) as process:
        if not python_frames(process.pid, [process.pid]):
            pytest.skip("py-spy may not read other processes here")
        assert "<module>" in watch(process, "spins")[-1].why


@pytest.mark.skipif(activity.py_spy() is None, reason="needs py-spy")
def test_a_thread_that_polls_is_still_where_its_frames_stay() -> None:
    with running(POLL) as process:
        if not python_frames(process.pid, [process.pid]):
            pytest.skip("py-spy may not read other processes here")
        assert "wait_for_batch" in python_frames(process.pid, [process.pid])
        watch(process, "still", looks=6)


def test_a_stopped_process_is_stopped_until_it_goes_on() -> None:
    with running(SLEEP) as process:
        os.kill(process.pid, signal.SIGSTOP)
        stopped = watch(process, "stopped")
        assert len({one.since_s for one in stopped[-4:]}) == 1
        os.kill(process.pid, signal.SIGCONT)
        watch(process, "still")


def test_what_has_ended_is_not_read() -> None:
    with running(SLEEP) as process:
        pass
    assert "cannot be read" in watch(process, "unread")[-1].why


def test_a_look_that_blocks_is_no_proof_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()

    def read(*_: object) -> dict[int, activity.Activity | str]:
        stuck.wait()
        return {}

    sensor, me = ActivitySensor(read), identify(os.getpid())
    assert me is not None
    suspects, now_s = {3: Suspect(me, (me.pid,), 1)}, 100.0
    try:
        for _ in range(200):
            sensor.look(now_s, suspects)
            now_s += 1.0
        found = sensor.stillness(3)
        assert found is not None
        assert found.how == "unread"
        assert "over 10 s" in found.why
        assert sum(one.name == "keepstep-look" for one in threading.enumerate()) == 4
        sensor.look(now_s, {})
        assert sensor.stillness(3) is None
    finally:
        stuck.set()
