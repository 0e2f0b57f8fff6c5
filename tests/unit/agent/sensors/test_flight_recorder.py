"""A process is asked what torch's flight recorder holds, also while its training thread hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.agent.sensors.flight_recorder import Answer, RecorderSensor, ask
from keepstep.core.device_questions import CALLS, address_of
from keepstep.core.events import Op
from keepstep.core.local_socket import listen
from keepstep.traces.dump_sets import Dump

SCRIPT = """\
import ctypes, sys, torch, torch.distributed as dist
from keepstep.capture.aborts import Aborts
from keepstep.capture.device_answers import answer_agent
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(8))
answer_agent(Aborts())
print("ready", flush=True)
sys.stdin.readline()
print("held", flush=True)
ctypes.PyDLL(None).sleep(60)  # with the interpreter's lock
"""


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    run_dir = tmp_path_factory.mktemp("run")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "KEEPSTEP_RUN_DIR": str(run_dir), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield run_dir, process
        process.kill()


def test_a_process_tells_its_calls_while_its_interpreter_is_held_and_is_mute_while_it_is_stopped(
    rank: tuple[Path, subprocess.Popen[str]],
) -> None:
    run_dir, process = rank
    assert ask(run_dir / "another", process.pid, 0) == (None, 0)
    answers = (ask(run_dir, process.pid, 0) for _ in range(20))  # it may be late on a busy machine
    found, cost_s = next(one for one in answers if one[0] != "mute")
    assert isinstance(found, Dump)
    assert 0 < cost_s < 1
    (call,) = found.entries
    assert (call.op, call.seq, call.done, call.content.bytes) == (Op.ALLREDUCE, 1, True, 32)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "held\n"
    answers = (ask(run_dir, process.pid, 0) for _ in range(20))
    assert next(one for one, _ in answers if one != "mute") == found
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert ask(run_dir, process.pid, 0) == ("mute", 0)


def test_another_process_at_the_address_is_not_asked(tmp_path: Path) -> None:
    """Containers that share a network share the addresses, too, and may have the same numbers of processes."""
    with listen(address_of(CALLS, str(tmp_path), 1)):
        assert ask(tmp_path, 1, 0) == (None, 0)


def test_a_rank_is_asked_now_and_then_and_never_waited_for(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []
    go_on, done = threading.Event(), threading.Event()
    dump = Dump({}, {}, [])

    def slowly(run_dir: Path, process: int, number: int) -> tuple[Answer, float]:
        asked.append((process, number))
        go_on.wait(10)
        threading.Timer(0.05, done.set).start()
        return dump, 0.001

    sensor = RecorderSensor(tmp_path, slowly)
    assert sensor.look(10.0, {3: (77, 5)}) == {}
    assert sensor.look(13.0, {3: (77, 6)}) == {}  # the first question is not answered yet
    go_on.set()
    assert done.wait(10)
    assert sensor.look(13.1, {}) == {3: (5, dump)}
    assert sensor.look(13.2, {}) == {}
    assert asked == [(77, 3)]
    done.clear()
    assert sensor.look(13.3, {3: (77, 6)}) == {}
    assert done.wait(10)
    assert sensor.look(13.4, {3: (77, 6)}) == {3: (6, dump)}
    assert sensor.look(13.5, {3: (77, 6)}) == {}
    assert asked == [(77, 3)] * 2


def test_begins_are_noted_only_of_processes_that_make_few_calls(tmp_path: Path) -> None:
    timed: list[int] = []
    done = threading.Event()

    def note(run_dir: Path, process: int) -> None:
        timed.append(process)
        done.set()

    sensor = RecorderSensor(tmp_path, time_calls=note)
    for second in range(6):
        sensor.time(100.0 + second, {7: (1000 + 200 * second, 2), 8: (5000 * second, 2)})
    assert done.wait(10)
    for second in range(6, 20):
        sensor.time(100.0 + second, {7: (1000 + 200 * second, 2), 8: (5000 * second, 2)})
    assert timed == [7]


def test_who_does_not_answer_at_once_is_told_by_the_last_answer(tmp_path: Path) -> None:
    held, asked = threading.Event(), threading.Event()
    dump = Dump({}, {}, [])

    def say(run_dir: Path, process: int, rank: int) -> tuple[Answer, float]:
        if process == 8 and asked.is_set():
            held.wait(10)
        asked.set()
        return (dump if process == 7 else "mute"), 0.0

    sensor = RecorderSensor(tmp_path, say)
    sensor.look(10.0, {1: (8, 5)})
    while not sensor._last:  # pyright: ignore[reportPrivateUsage]
        time.sleep(0.01)
    ranks = {0: (7, 3), 1: (8, 5)}
    now_s = 12.0
    try:
        fresh = asyncio.run(_answers(sensor, held, ranks))
        assert fresh == {0: dump}
        assert sensor.with_last(now_s, fresh, ranks) == {0: dump, 1: "mute"}
        assert sensor.with_last(19.0, fresh, ranks) == {0: dump}  # too old
        assert sensor.with_last(now_s, fresh, {**ranks, 1: (8, 6)}) == {0: dump}  # it has called since
    finally:
        held.set()


async def _answers(
    sensor: RecorderSensor, held: threading.Event, ranks: dict[int, tuple[int, int]]
) -> dict[int, Answer]:
    found = await sensor.answers(12.0, ranks)
    held.set()  # the loop waits for its threads at its end
    return found


def test_answers_take_a_thousandth_of_the_time_at_most(tmp_path: Path) -> None:
    """A dump of very many calls takes half a second: from a rank that goes on calling the next comes 450 s later."""
    asked: list[int] = []
    dump = Dump({}, {}, [], moved_ns=time.time_ns() - 10 * 10**9)

    def dearly(run_dir: Path, process: int, rank: int) -> tuple[Answer, float]:
        asked.append(process)
        return dump, {7: 0.5, 8: 0.005}[process]

    sensor = RecorderSensor(tmp_path, dearly)
    for now_s in range(100, 540, 2):
        asyncio.run(sensor.answers(now_s, {0: (7, now_s), 1: (8, now_s)}))
    assert asked.count(7) == 1
    assert 50 <= asked.count(8) <= 100  # 10 that were saved up, and one every five seconds
    asyncio.run(sensor.answers(560, {0: (7, 560)}))
    assert asked.count(7) == 2


def test_a_rank_that_calls_nothing_is_asked_more_often(tmp_path: Path) -> None:
    """A dump of half a second comes 24 s after the last one then, and the last one holds till then."""
    asked: list[int] = []
    dump = Dump({}, {}, [], moved_ns=time.time_ns() - 10 * 10**9)

    def dearly(run_dir: Path, process: int, rank: int) -> tuple[Answer, float]:
        asked.append(process)
        return dump, 0.5

    sensor = RecorderSensor(tmp_path, dearly)
    ranks = {0: (7, 3)}
    for now_s in range(100, 122, 2):
        fresh = asyncio.run(sensor.answers(now_s, ranks))
        assert sensor.with_last(now_s, fresh, ranks) == {0: dump}
        assert sensor.with_last(now_s, fresh, {0: (7, 4)}) == fresh
    assert asked == [7]
    asyncio.run(sensor.answers(124, ranks))
    assert asked == [7, 7]


def test_a_device_that_worked_when_it_was_asked_may_have_gone_on(tmp_path: Path) -> None:
    dump = Dump({}, {}, [], moved_ns=time.time_ns())
    sensor = RecorderSensor(tmp_path, lambda *_: (dump, 0.5))
    ranks = {0: (7, 3)}
    fresh = asyncio.run(sensor.answers(100.0, ranks))
    assert sensor.with_last(105.0, {}, ranks) == fresh == {0: dump}
    assert sensor.with_last(107.0, {}, ranks) == {}


def test_a_look_is_put_off_while_answers_are_dear(tmp_path: Path) -> None:
    asked: list[int] = []

    def dearly(run_dir: Path, process: int, rank: int) -> tuple[Answer, float]:
        asked.append(process)
        return None, 0.1

    sensor = RecorderSensor(tmp_path, dearly)
    for now_s, counts, times in ((10.0, 5, 1), (15.0, 6, 1), (50.0, 7, 1), (70.0, 8, 2)):
        sensor.look(now_s, {3: (77, counts)})
        while not all(one.is_answered for one in sensor._questions.values()):  # pyright: ignore[reportPrivateUsage]
            time.sleep(0.01)
        assert len(asked) == times
