"""Iterations as the GPU has them: from one boundary to the next, and how long communication blocked the compute stream.

Over stand-ins for NCCL, for CUDA's driver and for its runtime.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.nccl.shim import COMPILER, NATIVE, Built, command

from keepstep.core.events import Device, Flag, Kind
from keepstep.ring import RingReader

# A job whose steps are made by `step`, until one was measured after `steady()`. Times are in milliseconds.
JOB = """
import time
cuda = ctypes.CDLL(f"{folder}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
cudart = ctypes.CDLL(f"{sys.argv[3]}/libcudacaller.so", mode=getattr(ctypes, mode))
cudart.caller_event.restype = ctypes.c_void_p
mark = ctypes.CDLL(None).keepstep_device_mark
mark.argtypes, mark.restype = (ctypes.c_uint64, ctypes.c_void_p), None
cuda.cuCtxSetCurrent(ctypes.c_void_p(0x77))
comm = init(make_id(), 1, 0)
MAIN, OTHER = ctypes.c_void_p(0x30), ctypes.c_void_p(0x40)
DONE, SIDE = (ctypes.c_void_p(cudart.caller_event()) for _ in "ab")
number = 0
def launch(stream, ms):
    cuda.stand_in_launch(stream, ctypes.c_uint64(int(ms * 1e6)))
def boundary():
    global number
    number += 1
    mark(number, MAIN)
def communicate(ms, on=STREAM):
    os.environ["STAND_IN_GPU_MS"] = str(ms)
    all_reduce(comm, 1.0, 2.0, stream=on)
def wait(stream, event, behind):
    good(cudart.caller_cudaEventRecord(event, behind))
    good(cudart.caller_cudaStreamWaitEvent(stream, event))
def drain(seconds=0.15):
    time.sleep(seconds)
boundary(); drain(); boundary(); drain()  # events are made when they are first wanted
# All streams go on at one moment, when the host has called all that is to come.
launch(MAIN, 150)
cuda.cuEventRecord(SIDE, MAIN)
for stream in (STREAM, OTHER):
    cuda.cuStreamWaitEvent(stream, SIDE, 0)
boundary()
"""

TAIL = """
boundary(); drain(0.75)
print(number, cuda.stand_in_wrong())
"""


@pytest.fixture(scope="module")
def runtime(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runtime, whose symbols have the version of the real one's, and a caller of it."""
    return build_runtime(built, tmp_path_factory.mktemp("cudart"), 13)


def build_runtime(built: Built, folder: Path, version: int) -> Path:
    source, driver = NATIVE / "tests/stand_in_cudart.cpp", built.folder / "libcuda.so.1"
    library = (COMPILER, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
    name = f"libcudart.so.{version}"
    (folder / "map").write_text(f"{name} {{ global: cuda*; local: *; }};\n")
    named = (f"-Wl,-soname,{name}", f"-Wl,--version-script={folder / 'map'}")
    paths = f"-Wl,-rpath,{built.folder}:{folder}"
    command(*library, source, "-o", folder / name, driver, *named, paths)
    caller = folder / "libcudacaller.so"
    command(*library, "-DCALLER", source, "-o", caller, folder / name, driver, paths)
    return folder


def run(
    built: Built, runtime: Path, ring: int, step: str, mode: str = "RTLD_LOCAL", off: bool = False
) -> tuple[Any, str]:
    """The records of what was measured in ``step``, a job's last iteration, and what it said on stderr."""
    stdout, stderr = built.run(
        JOB + step + TAIL,
        built.environment(ring, KEEPSTEP_DEVICE_TIMES="0" if off else "1"),
        runtime,
        mode=mode,
    )
    number, wrong = map(int, stdout.split())
    assert wrong == 0
    rows = RingReader(ring).snapshot()
    rows = rows[rows["kind"] == int(Kind.DEVICE)]
    last = rows[(rows["op"] != int(Device.WAIT)) & (rows["peer"] == number)]
    assert set(rows["flags"].tolist()) <= {int(Flag.ENQUEUED | Flag.TIMED)}
    return last, stderr


def ms(one: Any) -> tuple[float, float]:
    """How long an iteration took, and for how long communication blocked it."""
    return (int(one["end_ns"]) - int(one["wait_ns"])) / 1e6, int(one["bytes"]) / 1e6


@pytest.mark.parametrize("mode", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_the_compute_stream_waits_for_communication(
    built: Built, runtime: Path, rings: list[int], mode: str
) -> None:
    step = "launch(MAIN, 100); communicate(300); wait(MAIN, DONE, STREAM); launch(MAIN, 50)"
    (one,), _ = run(built, runtime, rings[0], step, mode)
    assert one["op"] == Device.ITERATION
    assert ms(one) == pytest.approx((350, 200), abs=1)
    assert one["start_ns"] <= one["wait_ns"]


def test_a_wait_for_other_streams_is_the_ranks_own(built: Built, runtime: Path, rings: list[int]) -> None:
    step = "communicate(1); launch(OTHER, 300); wait(MAIN, SIDE, OTHER); launch(MAIN, 50)"
    (one,), _ = run(built, runtime, rings[0], step)
    assert ms(one) == pytest.approx((350, 0), abs=1)


def test_who_waits_for_a_stream_that_waits_for_communication(
    built: Built, runtime: Path, rings: list[int]
) -> None:
    step = "communicate(300); wait(OTHER, DONE, STREAM); wait(MAIN, SIDE, OTHER); launch(MAIN, 50)"
    (one,), _ = run(built, runtime, rings[0], step)
    assert ms(one) == pytest.approx((350, 300), abs=1)


def test_communication_on_the_compute_stream_blocks_it(built: Built, runtime: Path, rings: list[int]) -> None:
    (one,), _ = run(built, runtime, rings[0], "launch(MAIN, 100); communicate(200, on=MAIN)")
    assert ms(one) == pytest.approx((300, 200), abs=1)


def test_an_event_that_is_recorded_elsewhere_is_behind_nothing(
    built: Built, runtime: Path, rings: list[int]
) -> None:
    step = """
communicate(1); wait(MAIN, DONE, STREAM)
launch(OTHER, 300); wait(MAIN, DONE, OTHER)
"""
    (one,), _ = run(built, runtime, rings[0], step)
    assert ms(one) == pytest.approx((300, 1), abs=1)


def test_graphs_hide_their_communication(built: Built, runtime: Path, rings: list[int]) -> None:
    step = "launch(MAIN, 50); good(cudart.caller_cudaGraphLaunch(MAIN)); cudart.caller_cudaGraphLaunch(MAIN)"
    (one,), _ = run(built, runtime, rings[0], step)
    assert (one["op"], one["bytes"]) == (Device.BLIND, 2)


def test_a_capture_takes_no_events(built: Built, runtime: Path, rings: list[int]) -> None:
    step = """
communicate(1)
good(cudart.caller_cudaEventRecord(DONE, STREAM))
cuda.stand_in_capture(MAIN, 1)
good(cudart.caller_cudaStreamWaitEvent(MAIN, DONE))
cuda.stand_in_capture(MAIN, 0)
"""
    found, _ = run(built, runtime, rings[0], step)
    assert len(found) == 0  # a wait of it was not measured


def test_the_first_error_of_cuda_ends_it(built: Built, runtime: Path, rings: list[int]) -> None:
    step = """
launch(MAIN, 50)
cuda.stand_in_break()
communicate(1)
boundary(); drain(0.8)
cuda.stand_in_mend()
boundary(); drain(0.8)
"""
    found, said = run(built, runtime, rings[0], step)
    assert len(found) == 0
    assert said.count("the GPU's times are not taken any more") == 1


def test_a_variable_switches_it_off(built: Built, runtime: Path, rings: list[int]) -> None:
    step = "communicate(10); wait(MAIN, DONE, STREAM)"
    found, said = run(built, runtime, rings[0], step, off=True)
    assert (len(found), said) == (0, "")


TWO_RUNTIMES = """
folders = {13: sys.argv[3], 12: sys.argv[4]}
cuda = ctypes.CDLL(f"{folder}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
cuda.cuCtxSetCurrent(ctypes.c_void_p(0x77))
flag = getattr(ctypes, mode)
callers = {number: ctypes.CDLL(f"{where}/libcudacaller.so", mode=flag) for number, where in folders.items()}
comm = init(make_id(), 1, 0)
event = callers[13].caller_event
event.restype = ctypes.c_void_p
event = ctypes.c_void_p(event())
for number, times in ((12, 1), (13, 3), (12, 1)):
    for _ in range(times):
        assert callers[number].caller_cudaEventRecord(event, STREAM) == 0
runtimes = (ctypes.CDLL(f"{folders[number]}/libcudart.so.{number}") for number in (12, 13))
print(*(one.cudaStandInRecorded() for one in runtimes))
"""


@pytest.mark.parametrize("mode", ["RTLD_LOCAL", "RTLD_GLOBAL"])
def test_each_of_two_runtimes_in_a_process_gets_its_own_calls(
    built: Built, runtime: Path, rings: list[int], tmp_path: Path, mode: str
) -> None:
    other = build_runtime(built, tmp_path, 12)
    said = built.run(TWO_RUNTIMES, built.environment(rings[0]), runtime, other, mode=mode)
    assert said == ("2 3\n", "")
