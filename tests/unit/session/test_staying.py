"""A training that is left and begun again in its process; a thread plays the launcher."""

from __future__ import annotations

import gc
import io
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from keepstep.core.staying import ADDRESS, LEAVE, LEFT, LOST, REFUSED
from keepstep.session import staying
from keepstep.session.staying import SIGNAL, Left, Staying

PATIENCE_S = 60
ENVIRONMENT = b'{"KEEPSTEP_INCARNATION": "%d"}'


class Launcher:
    """The other end."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(PATIENCE_S)
        self.worker = Staying(theirs)
        self.heard: list[str] = []
        self.threads: list[threading.Thread] = []

    def play(self, script: Callable[[Launcher], None]) -> None:
        self.threads.append(threading.Thread(target=script, args=(self,), daemon=True))
        self.threads[-1].start()

    def leave(self) -> None:
        self.socket.send(LEAVE.encode())

    def hear(self) -> str:
        self.heard.append(self.socket.recv(4096).decode())
        return self.heard[-1]

    def begin(self, incarnation: int) -> None:
        socket.send_fds(self.socket, [ENVIRONMENT % incarnation], [1, 2])


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    # What tests before this one have compiled or imported in this process is no part of the training.
    monkeypatch.setattr(staying.groups, "refusal", lambda **_: "")
    environ = dict(os.environ)
    made = Launcher()
    yield made
    for thread in made.threads:
        thread.join(PATIENCE_S)
    made.socket.close()
    for thread in threading.enumerate():
        if thread.name == "keepstep-staying":
            thread.join(PATIENCE_S)
    signal.signal(SIGNAL, signal.SIG_IGN)
    gc.unfreeze()
    os.environ.clear()
    os.environ.update(environ)


def again(launcher: Launcher) -> None:
    """One recovery."""
    launcher.leave()
    launcher.hear()
    launcher.begin(1)


def test_whatever_it_waits_in_it_is_left_and_begun_again(launcher: Launcher) -> None:
    seen: list[Any] = []

    def train() -> str:
        seen.append((os.environ.get("KEEPSTEP_INCARNATION"), torch.rand(1).item()))
        if len(seen) == 1:
            try:
                launcher.play(again)
                time.sleep(PATIENCE_S)
            finally:
                seen.append("finally")
        return "trained"

    assert launcher.worker.run(train) == "trained"
    assert launcher.heard == [LEFT]
    (_, first), second, (incarnation, drawn) = seen
    assert (second, incarnation) == ("finally", "1")
    assert drawn == first  # as a fresh process, which has drawn nothing yet


def test_what_was_said_is_written_before_the_next_incarnation_has_other_streams(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[list[str]] = []
    said = io.StringIO()
    monkeypatch.setattr(said, "flush", lambda: flushed.append(launcher.heard.copy()))
    monkeypatch.setattr("sys.stdout", said)

    def train() -> None:
        if not flushed:
            launcher.play(again)
            time.sleep(PATIENCE_S)

    launcher.worker.run(train)
    assert flushed[0] == []  # before the launcher was told that the training is left
    assert launcher.heard == [LEFT]


def test_a_training_that_handles_every_exception_is_left_all_the_same(launcher: Launcher) -> None:
    entries: list[int] = []

    def train() -> None:
        entries.append(1)
        while len(entries) == 1:
            if not launcher.threads:
                launcher.play(again)
            try:
                time.sleep(0.01)
            except Exception:
                continue

    launcher.worker.run(train)
    assert len(entries) == 2


def counted() -> list[int]:
    """One for each `Left` that is raised from here on."""
    handler: Any = signal.getsignal(SIGNAL)
    blows: list[int] = []

    def handle(*told: Any) -> None:
        try:
            handler(*told)
        except Left:
            blows.append(1)
            raise

    signal.signal(SIGNAL, handle)
    return blows


def test_one_that_handles_the_first_blow_gets_another(launcher: Launcher) -> None:
    blows = counted()

    def train() -> None:
        if blows:
            return
        try:
            launcher.play(again)
            time.sleep(PATIENCE_S)
        except Left:
            pass
        time.sleep(PATIENCE_S)

    launcher.worker.run(train)
    assert launcher.heard == [LEFT]
    assert len(blows) >= 2


def test_what_unwinds_is_not_struck_again_at_once(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staying, "_UNWINDING_S", PATIENCE_S)
    blows, unwound = counted(), list[str]()

    def train() -> None:
        if blows:
            return
        try:
            try:
                launcher.play(again)
                time.sleep(PATIENCE_S)
            finally:
                signal.raise_signal(SIGNAL)
                unwound.append("inner")
        finally:
            signal.raise_signal(SIGNAL)
            unwound.append("outer")

    launcher.worker.run(train)
    assert (unwound, len(blows), launcher.heard) == (["inner", "outer"], 1, [LEFT])


def test_one_that_never_ends_to_unwind_is_struck_again(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staying, "_UNWINDING_S", 0.05)
    blows = counted()

    def train() -> None:
        if blows:
            return
        try:
            launcher.play(again)
            time.sleep(PATIENCE_S)
        finally:
            time.sleep(PATIENCE_S)

    launcher.worker.run(train)
    assert launcher.heard == [LEFT]
    assert len(blows) >= 2


def test_an_order_that_follows_at_once_is_obeyed(launcher: Launcher) -> None:
    def twice(launcher: Launcher) -> None:
        again(launcher)
        launcher.leave()
        launcher.hear()
        launcher.begin(2)

    entries: list[str | None] = []

    def train() -> None:
        entries.append(os.environ.get("KEEPSTEP_INCARNATION"))
        if not launcher.threads:
            launcher.play(twice)
        if entries[-1] != "2":
            time.sleep(PATIENCE_S)

    launcher.worker.run(train)
    assert launcher.heard == [LEFT, LEFT]
    assert entries[-1] == "2"


def test_its_own_error_is_raised_at_once_and_there_is_no_way_back(launcher: Launcher) -> None:
    def train() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        launcher.worker.run(train)
    launcher.leave()
    assert launcher.hear().startswith(REFUSED)


def test_a_training_in_another_thread_says_that_it_cannot_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    name, made = f"keepstep-test-{os.getpid()}", list[Any]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        monkeypatch.setenv(ADDRESS, name)
        thread = threading.Thread(target=lambda: made.append(staying.staying()))
        thread.start()
        thread.join(PATIENCE_S)
        listener.settimeout(PATIENCE_S)
        with listener.accept()[0] as worker:
            assert worker.recv(100).decode() == f"{REFUSED} its training does not run in the main thread"
    assert made == [None]


@pytest.mark.parametrize("wrapped", [False, True])
def test_who_has_lost_a_peer_waits_for_the_order(launcher: Launcher, wrapped: bool) -> None:
    entries: list[int] = []

    def train() -> None:
        entries.append(1)
        if len(entries) == 1:
            launcher.play(again)
            lost = RuntimeError("Connection closed by peer [127.0.0.1]:4711")
            if wrapped:
                raise ValueError("no batch") from lost
            raise lost

    launcher.worker.run(train)
    assert (len(entries), launcher.heard) == (2, [LEFT])


def test_who_lost_others_says_so_where_nobody_has_died(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staying, "_DEATHS_TOLD_S", 0.01)
    entries: list[int] = []

    def order(one: Launcher) -> None:
        one.hear()
        again(one)

    def train() -> None:
        entries.append(1)
        if len(entries) == 1:
            launcher.play(order)
            raise RuntimeError("Connection closed by peer\n [127.0.0.1]:4711")

    launcher.worker.run(train)
    said = f"{LOST} RuntimeError: Connection closed by peer\\n [127.0.0.1]:4711"
    assert (len(entries), launcher.heard) == (2, [said, LEFT])


class Failed:
    """A group on GPUs, and its backend, of which torch's watchdog says this."""

    def __init__(self, error: str) -> None:
        self._device_types, self.name = ["cuda"], error

    def _get_backend(self, _: str) -> Failed:
        return self

    def get_error(self) -> Failed:
        return self


@pytest.mark.parametrize("error", ["REMOTE_ERROR", "COMM_ERROR", "SUCCESS"])
def test_an_error_of_nccls_is_the_others_where_the_watchdog_has_found_them(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    monkeypatch.setattr(staying.groups, "on_device", lambda: [Failed(error)])
    monkeypatch.setattr(staying, "_DEATHS_TOLD_S", 5.0)
    entries: list[int] = []

    def train() -> None:
        entries.append(1)
        if len(entries) == 1:
            if error == "REMOTE_ERROR":
                launcher.play(again)
            raise torch.distributed.DistBackendError("NCCL error, invalid argument, NCCL version 2.30.7")

    if error == "REMOTE_ERROR":
        launcher.worker.run(train)
        assert (len(entries), launcher.heard) == (2, [LEFT])
    else:
        with pytest.raises(torch.distributed.DistBackendError):
            launcher.worker.run(train)


def test_what_held_the_training_is_let_go(launcher: Launcher) -> None:
    """The frames of an exception, and those of the one that it came from."""
    import weakref

    class Model:
        pass

    made: list[weakref.ref[Model]] = []

    def train() -> None:
        if made:
            assert made[0]() is None
            return
        model = Model()
        made.append(weakref.ref(model))
        try:
            launcher.play(again)
            time.sleep(PATIENCE_S)
        finally:
            raise RuntimeError("Connection reset by peer") from ValueError(model)

    launcher.worker.run(train)
