"""The GPU's times of NCCL's calls, which the shim takes when its agent orders it: over stand-ins for NCCL and CUDA."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.unit.nccl.shim import Built

from keepstep.core.events import Flag, Kind, Life
from keepstep.ring import RingReader
from keepstep.ring.orders import OrdersPage, create

GPU = """
import select, time
cuda = ctypes.CDLL(f"{folder}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
cuda.stand_in_launch.restype = ctypes.c_uint64
CONTEXT, OTHER = ctypes.c_void_p(0x77), ctypes.c_void_p(0x20)
cuda.cuCtxSetCurrent(CONTEXT)
comm = init(make_id(), 1, 0)
def busy(seconds):
    return cuda.stand_in_launch(STREAM, ctypes.c_uint64(int(seconds * 1e9)))
def name(thread):
    try:
        return open(f"/proc/self/task/{thread}/comm").read()
    except OSError:  # it ended since it was listed
        return ""
def reports():
    return any("keepstep-gpu" in name(thread) for thread in os.listdir("/proc/self/task"))
def calls_until_told():
    while not select.select([sys.stdin], [], [], 0)[0]:
        all_reduce(comm, 1.0)
    sys.stdin.readline()
def waits():
    print("waits", flush=True)
    sys.stdin.readline()
calls_until_told()
waits()
"""

ONE = """
os.environ["STAND_IN_GPU_MS"] = "20"
until = busy(3)
all_reduce(comm, 1.0, 2.0, 3.0)
after = time.monotonic_ns()
waits()
all_reduce(comm, 1.0, 2.0)
while reports():
    time.sleep(0.001)
print(until, after, cuda.stand_in_wrong())
"""

GROUP = """
os.environ["STAND_IN_GPU_MS"] = "10"
good(nccl.caller_ncclGroupStart())
one, two = floats(1, 2, 3), floats(1, 2, 3, 4)
good(nccl.caller_ncclAllReduce(one, one, size(3), FLOAT32, SUM, comm, STREAM))
good(nccl.caller_ncclAllReduce(two, two, size(4), FLOAT32, SUM, comm, OTHER))
good(nccl.caller_ncclGroupEnd())
waits()
print(cuda.stand_in_wrong())
"""

FAILING_GROUP = """
good(nccl.caller_ncclGroupStart())
one = floats(1, 2)
good(nccl.caller_ncclAllReduce(one, one, size(2), FLOAT32, SUM, comm, STREAM))
good(nccl.caller_ncclAllReduce(one, one, size(2), 99, SUM, comm, STREAM))
assert nccl.caller_ncclGroupEnd() == 4
print(all_reduce(comm, 1.0, 2.0, 3.0))
waits()
"""

CAPTURE = """
cuda.stand_in_capture(STREAM, 1)
all_reduce(comm, 1.0, 2.0)
all_reduce(comm, 1.0, 2.0, 3.0, 4.0, stream=None)
for _ in range(200):
    all_reduce(comm, 1.0, 2.0, 3.0, stream=OTHER)
waits()
cuda.stand_in_capture(STREAM, 0)
all_reduce(comm, 1.0, 2.0, 3.0, 4.0, 5.0, stream=None)
waits()
print(cuda.stand_in_wrong())
"""

NEVER_ENDS = """
busy(10**9)
all_reduce(comm, 1.0, 2.0)
all_reduce(comm, 1.0, 2.0, 3.0, stream=OTHER)
waits()
cuda.stand_in_break()
waits()
print(all_reduce(comm, 1.0, 2.0, 3.0, 4.0))
"""

MANY = """
def work(number):
    cuda.cuCtxSetCurrent(CONTEXT)
    own = init(make_id(), 1, 0)
    for turn in range(2000):
        all_reduce(own, 1.0, 2.0, stream=ctypes.c_void_p(0x1000 + number))
workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for one in workers: one.start()
for one in workers: one.join()
waits()
while reports():
    time.sleep(0.001)
print(cuda.stand_in_wrong())
"""


@dataclass
class Worker:
    """A process that calls, and what its ring and its orders page have."""

    built: Built
    process: subprocess.Popen[str]
    reader: RingReader
    page: OrdersPage

    def order(self, seconds: float = 60) -> None:
        """Times are taken from the next calls on, and nothing is under way; it goes on."""
        self.page.take_times(time.monotonic_ns() + int(seconds * 1e9))
        self.until(lambda rows: (rows["flags"] & Flag.TIMED).any())
        self.go()
        self.waits()
        self.until(all_ended)
        self.go()

    def until(self, fits: Callable[[Any], bool]) -> None:
        give_up_s = time.monotonic() + 120
        while not fits(self.rows()):
            assert self.process.poll() is None
            assert time.monotonic() < give_up_s
            time.sleep(0.01)

    def rows(self) -> Any:
        rows = self.reader.snapshot()
        return rows[rows["kind"] == int(Kind.COLLECTIVE)]

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def waits(self) -> None:
        """Until the process comes to its next halt."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "waits\n"

    def end(self) -> str:
        ((said, _),) = self.built.together([self.process])
        return said

    def calls(self) -> Any:
        """The collectives of more than a number."""
        rows = self.rows()
        return rows[rows["bytes"] > 4]


@pytest.fixture
def start(built: Built, rings: list[int]) -> Iterator[Callable[..., Worker]]:
    descriptor = create()
    made: list[Worker] = []

    def started(script: str) -> Worker:
        orders = f"/proc/{os.getpid()}/fd/{descriptor}"
        process = built.start(GPU + script, built.environment(rings[0], KEEPSTEP_ORDERS=orders))
        made.append(Worker(built, process, RingReader(rings[0]), OrdersPage(descriptor)))
        made[-1].until(lambda rows: len(rows) > 0)
        return made[-1]

    yield started
    for one in made:
        one.process.kill()
        one.process.communicate()
        one.page.close()
    os.close(descriptor)


def all_ended(rows: Any) -> bool:
    return len(rows) > 0 and bool((rows["end_ns"] > 0).all())


def test_a_call_begins_and_ends_when_the_gpu_does(start: Callable[..., Worker]) -> None:
    worker = start(ONE)
    worker.order()
    worker.waits()
    worker.until(lambda rows: all_ended(worker.calls()))
    worker.page.take_times(0)
    worker.go()
    until, after, wrong = map(int, worker.end().split())
    first, later = worker.calls()
    assert first["flags"] == Flag.ENQUEUED | Flag.TIMED
    assert first["start_ns"] < after < first["wait_ns"]
    assert first["wait_ns"] == pytest.approx(until, abs=5e6)  # what was on the stream before it is over
    assert first["end_ns"] - first["wait_ns"] == pytest.approx(20e6, abs=1e5)
    assert later["flags"] == Flag.ENQUEUED  # not ordered any more
    assert (later["wait_ns"], later["end_ns"] > 0) == (0, True)
    assert wrong == 0


def test_calls_of_a_group_have_the_times_of_their_streams(start: Callable[..., Worker]) -> None:
    worker = start(GROUP)
    worker.order()
    worker.waits()
    worker.until(lambda rows: all_ended(worker.calls()))
    worker.go()
    assert worker.end() == "0\n"
    for one in worker.calls():
        assert one["flags"] == Flag.ENQUEUED | Flag.TIMED | Flag.GROUPED
        assert one["start_ns"] <= one["wait_ns"]
        assert one["end_ns"] - one["wait_ns"] == pytest.approx(10e6, abs=1e5)
    rows = worker.reader.snapshot()
    groups = rows[(rows["kind"] == int(Kind.COMMUNICATOR)) & (rows["op"] == int(Life.GROUP))]
    assert groups["bytes"].tolist() == [2]


def test_a_group_that_fails_is_over_at_once(start: Callable[..., Worker]) -> None:
    worker = start(FAILING_GROUP)
    worker.order()
    assert worker.process.stdout is not None
    assert worker.process.stdout.readline() == "[1.0, 2.0, 3.0]\n"
    worker.waits()
    worker.until(lambda rows: all_ended(rows))
    failed = [bool(one["flags"] & Flag.FAILED) for one in worker.rows()[-3:]]
    assert failed == [True, True, False]


def test_nothing_is_put_into_a_graph(start: Callable[..., Worker]) -> None:
    worker = start(CAPTURE)
    worker.order()
    worker.waits()
    worker.until(lambda rows: all_ended(worker.calls()))
    worker.go()
    worker.waits()
    worker.until(lambda rows: all_ended(worker.calls()))
    worker.go()
    assert worker.end() == "0\n"
    timed = (worker.calls()["flags"] & Flag.TIMED).tolist()
    assert timed[:2] == [0, 0]  # on the captured stream, and on the default one meanwhile
    assert Flag.TIMED in timed[2:-1]  # on others
    assert timed[-1] == Flag.TIMED  # on the default one, afterwards


def test_what_the_gpu_never_ends_stays_in_flight(start: Callable[..., Worker]) -> None:
    worker = start(NEVER_ENDS)
    worker.order()
    worker.waits()
    worker.until(lambda rows: worker.calls()["end_ns"][1] > 0)
    assert worker.calls()["end_ns"][0] == 0
    worker.go()
    worker.waits()
    worker.until(lambda rows: all_ended(rows))
    worker.go()
    assert worker.end() == "[1.0, 2.0, 3.0, 4.0]\n"  # the driver is broken: calls go on, untimed
    stuck, _, last = worker.calls()
    assert stuck["flags"] & Flag.FAILED
    assert last["flags"] == Flag.ENQUEUED


def test_threads_call_while_it_is_switched_on_and_off(start: Callable[..., Worker]) -> None:
    worker = start(MANY)
    worker.order()
    for turn in range(100):
        worker.page.take_times(time.monotonic_ns() + 10**10 if turn % 2 else 0)
        time.sleep(0.001)
    worker.waits()
    worker.page.take_times(0)
    worker.until(lambda rows: all_ended(rows))
    worker.go()
    assert worker.end() == "0\n"


@pytest.mark.parametrize("until", [1, 2**64 - 1])
def test_an_order_that_is_old_or_makes_no_sense_is_none(start: Callable[..., Worker], until: int) -> None:
    worker = start("assert not reports()\nwaits()")
    worker.page.take_times(until)
    count = len(worker.rows())
    worker.until(lambda rows: len(rows) > count + 10 or len(rows) > 1000)
    worker.go()
    worker.waits()
    worker.go()
    worker.waits()
    assert set(worker.rows()["flags"].tolist()) == {int(Flag.ENQUEUED)}
