"""A native thread of a rank's process tells what torch's flight recorder holds, whatever Python does meanwhile."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.core.device_questions import CALLS, MOST_BYTES, address_of
from keepstep.core.local_socket import connect

pytest.importorskip("torch")

from keepstep.capture import internals

SOURCE = Path(__file__).parents[3] / "native" / "tests" / "recorders.cpp"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
PATIENCE_S = 60
TWO, PYTHONS = b'{"entries":[{"collective_seq_id":2}]}', b'{"entries":[{"collective_seq_id":7}]}'
# What `telling` of recorders.cpp does.
TELLS, THROWS, TELLS_TOO_MUCH, IS_SLOW = range(4)
SCRIPT = f"""\
import ctypes, os, sys
from keepstep.capture import device_answers
from keepstep.capture.aborts import Aborts
from keepstep.capture.patches import Patches
aborts = Aborts()
aborts.install(Patches())
recorders = ctypes.CDLL(sys.argv[1])
def address(name):
    function = getattr(recorders, name)
    function.restype = ctypes.c_void_p
    return function()
device_answers.native_dumps = lambda: tuple(address(name) for name in sys.argv[2:])
device_answers.recorded_calls = lambda: {PYTHONS!r}
device_answers.answer_agent(aborts)
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("ran", flush=True)
"""


class Worker:
    """A process with these recorders of ``recorders.cpp``, which runs lines of Python that it is sent."""

    def __init__(self, library: Path, run_dir: Path, recorders: tuple[str, ...]) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(library), *recorders],
            env={**os.environ, "KEEPSTEP_RUN_DIR": str(run_dir), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.says() == "ready"

    def begins(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def runs(self, line: str) -> None:
        self.begins(line)
        assert self.says() == "ran"

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def hold_interpreter(self) -> None:
        self.begins(f"print('held', flush=True); ctypes.PyDLL(None).sleep({PATIENCE_S})")
        assert self.says() == "held"

    def question(self) -> socket.socket:
        address = address_of(CALLS, str(self.run_dir), self.process.pid)
        return connect(address, "rank", PATIENCE_S, self.process.pid)

    def told(self) -> bytes | None:
        """Its answer; None if it gives none."""
        with self.question() as connection:
            return answer_on(connection)

    def ends(self) -> list[str]:
        """What it still says up to its end, which must be a good one."""
        told, _ = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0
        return told.splitlines()


def answer_on(connection: socket.socket) -> bytes | None:
    message, descriptors, _, _ = socket.recv_fds(connection, 32, 1)
    if not descriptors:
        return None
    assert re.fullmatch(rb"calls \d{1,9}", message)
    with os.fdopen(descriptors[0], "rb") as file:
        return os.pread(file.fileno(), MOST_BYTES + 1, 0)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C++ compiler (set CXX)")
    built = tmp_path_factory.mktemp("built") / "recorders.so"
    subprocess.run([COMPILER, "-std=c++17", "-shared", "-fPIC", str(SOURCE), "-o", str(built)], check=True)
    return built


@pytest.fixture
def worker(library: Path, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Starts a worker that has these recorders."""
    started: list[Worker] = []

    def start(*recorders: str) -> Worker:
        started.append(Worker(library, tmp_path, recorders))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        if one.process.stdin is not None and not one.process.stdin.closed:
            one.process.communicate()


def test_what_a_recorder_holds_is_told_whatever_becomes_of_it(worker: Callable[..., Worker]) -> None:
    one = worker("silent", "telling")
    assert one.told() == TWO
    one.runs(f"recorders.go({THROWS})")
    assert one.told() is None
    one.runs(f"recorders.go({TELLS_TOO_MUCH})")
    assert one.told() == b""
    one.runs(f"recorders.go({TELLS})")
    one.hold_interpreter()
    assert [one.told() for _ in range(3)] == [TWO] * 3
    assert one.process.poll() is None


def test_where_torch_has_no_such_function_python_answers_while_it_can(worker: Callable[..., Worker]) -> None:
    one = worker()
    assert one.told() == PYTHONS
    one.runs("aborts.happened = True")
    assert one.told() is None


def test_torchs_functions_are_found_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [name for name in internals.NATIVE_DUMPS if hasattr(ctypes.CDLL("libtorch_python.so"), name)]
    assert len(internals.native_dumps()) == len(set(internals.native_dumps())) == len(known)
    monkeypatch.setattr(internals, "NATIVE_DUMPS", ("_ZN4c10d7missingEv",))
    assert internals.native_dumps() == ()
    monkeypatch.setattr(internals, "TORCH_LIBRARY", "libtorch_of_another_make.so")
    assert internals.native_dumps() == ()


def test_an_abort_waits_for_an_answer_on_its_way_and_is_the_end_of_answers(
    worker: Callable[..., Worker],
) -> None:
    """But one in a forked child, where nobody answers, neither waits nor ends those of its parent."""
    one = worker("telling")
    one.runs(f"recorders.go({IS_SLOW})")
    with one.question() as connection:
        assert one.says() == "reads"
        one.begins("os.fork() or (aborts._note(object()), os._exit(0)); os.wait()")
        assert (one.says(), one.says()) == ("ran", "has read")
        assert answer_on(connection) == TWO
    with one.question() as connection:
        assert one.says() == "reads"
        one.begins("aborts._note(object())")
        assert (one.says(), one.says()) == ("has read", "ran")
        assert answer_on(connection) == TWO
    with pytest.raises(ConnectionRefusedError):
        one.question()


@pytest.mark.parametrize("way", ["sys.exit()", "ctypes.CDLL(None).exit(0)"])
def test_a_process_that_ends_waits_for_an_answer_on_its_way(worker: Callable[..., Worker], way: str) -> None:
    one = worker("telling")
    one.runs(f"recorders.go({IS_SLOW})")
    with one.question():
        assert one.says() == "reads"
        one.begins(way)
        assert one.ends() == ["has read", "the end"]
