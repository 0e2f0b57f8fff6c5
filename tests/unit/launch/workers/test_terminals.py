"""Words on a terminal: a worker sees one, its bytes come out as they were, and nobody's death stops it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.screen import Screen

from keepstep.launch.workers.kept_words import Console, KeptWords, can_be_kept, new_memory
from keepstep.launch.workers.terminals import drop, open_terminal, read_into
from keepstep.launch.workers.words_keeper import Kept, fork_keeper

pytestmark = pytest.mark.skipif(not can_be_kept(), reason="no memfd that can be freed in part")


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    made.close()


def test_a_worker_sees_a_terminal_of_the_consoles_size(screen: Screen) -> None:
    reader, writer = open_terminal(screen.slave)
    assert os.isatty(writer)
    assert os.get_terminal_size(writer) == (101, 33)
    os.close(reader)
    os.close(writer)


def test_bytes_come_out_as_they_were_written_and_it_ends_with_the_last_writer(screen: Screen) -> None:
    reader, writer = open_terminal(screen.slave)
    memory, memory_reader, memory_writer = new_memory()
    os.close(memory_writer)
    data = bytes(range(256)) + b"a\nb\r\nc\rd\x1b[31m\n" * 100
    other = os.dup(writer)
    os.write(writer, data)
    assert read_into(reader, memory)
    os.close(writer)
    assert read_into(reader, memory)
    os.write(other, b"last")
    os.close(other)
    assert not read_into(reader, memory)
    assert os.pread(memory_reader, 1 << 20, 0) == data + b"last"
    assert not drop(reader)
    for descriptor in (reader, memory, memory_reader):
        os.close(descriptor)


def test_a_console_that_was_stopped_takes_nothing_and_waits_for_nobody(screen: Screen) -> None:
    console = Console(screen.slave)
    done = 0
    data = b"x" * 100 + b"\n"
    while (written := console.write(data)) == len(data):
        done += written
    assert not console.ready  # as it has refused some just now
    done += written
    flags = fcntl.fcntl(screen.slave, fcntl.F_GETFL)
    assert not flags & os.O_NONBLOCK  # the shell's descriptor is as it was
    screen.until(lambda: len(screen.seen.replace(b"\r\n", b"\n")) == done)
    screen.until(lambda: console.ready)
    assert console.write(b"again\n") == 6


def test_a_terminal_that_has_gone_is_nobodys_trouble() -> None:
    screen = Screen()
    console = Console(screen.slave)
    os.close(screen.master)
    assert console.write(b"a\n") == 2
    assert console.is_gone
    os.close(screen.slave)


# A launcher that starts keeper and worker, and lets its worker live when it dies.
LAUNCHER = """
import os, subprocess, sys, time
from keepstep.launch.workers.kept_words import new_memory
from keepstep.launch.workers.terminals import open_terminal
from keepstep.launch.workers.words_keeper import Kept, fork_keeper
folder, script = sys.argv[1:]
memory, reader, writer = new_memory()
os.close(writer)
terminal, writer = open_terminal(2)
keeper = fork_keeper()
Kept(0, "rank 0", 2, folder + "/head", folder + "/end").send(keeper, memory, reader, terminal)
worker = subprocess.Popen([sys.executable, "-c", script, folder], stdin=-3, stdout=writer, stderr=writer,
                          start_new_session=True)
os.close(writer)
open(folder + "/started", "w").write(str(worker.pid))
time.sleep(600)
"""
WORKER = """
import os, sys, time
assert os.isatty(1) and os.get_terminal_size(2) == (101, 33)
def say(text):
    os.write(2, text.encode())
say("first\\n")
while not os.path.exists(sys.argv[1] + "/killed"): time.sleep(0.01)
slowest = 0.0
for number in range(3000):
    began = time.perf_counter()
    say(f"line {number} \\033[32mgreen\\033[0m\\n")
    slowest = max(slowest, time.perf_counter() - began)
say("\\r 99% ####")
open(sys.argv[1] + "/done", "w").close()
"""


def test_a_worker_writes_on_when_the_launcher_was_killed(screen: Screen, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), WORKER]
    launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=screen.slave, stderr=screen.slave)
    screen.until(lambda: b"first\r\n" in screen.seen)
    launcher.kill()
    launcher.wait()
    (tmp_path / "killed").touch()
    screen.until((tmp_path / "done").exists)
    screen.until(lambda: screen.seen.endswith(b"\r 99% ####"))
    lines = "".join(f"line {number} \x1b[32mgreen\x1b[0m\n" for number in range(3000)).encode()
    whole = b"first\n" + lines + b"\r 99% ####"
    # The screen's own terminal, as any, shows each newline with a return.
    assert screen.seen == whole.replace(b"\n", b"\r\n")
    screen.until(lambda: kept_in(tmp_path) == whole)


def kept_in(folder: Path) -> bytes:
    return b"".join((folder / name).read_bytes() for name in ("head", "end") if (folder / name).exists())


def test_another_keeper_goes_on_where_one_was_killed(screen: Screen, tmp_path: Path) -> None:
    memory, reader, writer = new_memory()
    os.close(writer)
    terminal, writer = open_terminal(screen.slave)
    told = Kept(0, "rank 0", 2, str(tmp_path / "head"), str(tmp_path / "end"))
    before = os.dup(2)
    os.dup2(screen.slave, 2)
    try:
        first, first_pid = new_keeper()
        told.send(first, memory, reader, terminal)
        os.write(writer, b"one\n")
        screen.until(lambda: screen.seen == b"one\r\n")
        os.kill(first_pid, signal.SIGKILL)
        os.waitpid(first_pid, 0)
        os.write(writer, b"two\n")
        second, second_pid = new_keeper()
        told.send(second, memory, reader, terminal)
    finally:
        os.dup2(before, 2)
        os.close(before)
    os.write(writer, b"three")
    os.close(writer)
    screen.until(lambda: screen.seen == b"one\r\ntwo\r\nthree")
    for one in (first, second):
        one.close()
    os.waitpid(second_pid, 0)
    assert kept_in(tmp_path) == b"one\ntwo\nthree"
    for descriptor in (memory, reader, terminal):
        os.close(descriptor)


def new_keeper() -> tuple[socket.socket, int]:
    """A keeper's socket and process id."""
    before = children()
    keeper = fork_keeper()
    (pid,) = children() - before
    return keeper, pid


def children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def test_kept_words_of_a_terminal_are_over_when_it_is(screen: Screen, tmp_path: Path) -> None:
    memory, reader, writer = new_memory()
    os.close(writer)
    terminal, writer = open_terminal(screen.slave)
    kept = KeptWords(
        memory, reader, Console(screen.slave), "rank 0", tmp_path / "head", tmp_path / "end", terminal
    )
    assert kept.take()
    assert not kept.is_over
    os.write(writer, b"a\n")
    os.close(writer)
    assert not kept.take()
    assert kept.is_over
    assert kept.show(last=True)
    screen.until(lambda: screen.seen == b"a\r\n")
    kept.close()
