"""The stand-in's CUDA runtime keeps the rules that a job on a GPU relies on. Each test is one process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.stand_in.launch import PYTHON, environment

PROLOGUE = """
import ctypes, threading, time
import torch
from benchmarks.stand_in.device import ECC, ILLEGAL_ADDRESS, Device
device = Device()
x = torch.zeros(4, device="cuda")
torch.cuda.synchronize()

def time_of(event, since):
    event.synchronize()
    return since.elapsed_time(event)

def until(ready):
    for _ in range(3000):
        if ready():
            return True
        time.sleep(0.01)
    return False
"""


def in_a_process(folder: Path, code: str, **options: object) -> str:
    """What it prints."""
    done = subprocess.run(
        [PYTHON, "-c", PROLOGUE + code],
        env=environment(folder, **options),  # type: ignore[arg-type]
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_streams_and_events_tell_the_devices_time_exactly(tmp_path: Path) -> None:
    code = """
side = torch.cuda.Stream()
begin, main_done, side_done, joined = (torch.cuda.Event(enable_timing=True) for _ in range(4))
begin.record()
for _ in range(7):
    x.add_(1)
main_done.record()
side.wait_event(begin)
with torch.cuda.stream(side):
    for _ in range(3):
        x.mul_(2)
    side_done.record()
    side.wait_event(main_done)
    x.mul_(2)
    joined.record()
print(*(round(time_of(event, begin), 4) for event in (main_done, side_done, joined)))
device.slow_down(1.3)
begin.record()
x.add_(1)
main_done.record()
print(round(time_of(main_done, begin), 4))
"""
    assert in_a_process(tmp_path, code, clock="virtual", kernel_us=100) == "0.7 0.3 0.8\n0.13"


def test_launch_times_are_by_kind(tmp_path: Path) -> None:
    code = """
linear = torch.nn.Linear(64, 64, bias=False).cuda()
optimizer = torch.optim.AdamW(linear.parameters(), fused=True)
linear(torch.ones(1, 64, device="cuda")).sum().backward()
optimizer.step()
def took(action):
    a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    a.record(); action(); b.record()
    return round(time_of(b, a), 4)
y = torch.ones(2, 64, device="cuda")
with torch.no_grad():
    print(took(lambda: linear(y)), took(lambda: y.sum()), took(lambda: y.add_(1)))
"""
    times = "gemm=300,reduction=20,other=10"
    assert in_a_process(tmp_path, code, clock="virtual", kernel_us=times) == "0.3 0.02 0.01"


def test_the_legacy_stream_and_blocking_ones_wait_for_each_other(tmp_path: Path) -> None:
    code = """
runtime = ctypes.CDLL("libcudart.so.13")
def stream(flags):
    made = ctypes.c_void_p()
    assert runtime.cudaStreamCreateWithFlags(ctypes.byref(made), flags) == 0
    return torch.cuda.ExternalStream(made.value)
blocking, free = stream(0), stream(1)
begin, on_blocking, on_free, on_legacy = (torch.cuda.Event(enable_timing=True) for _ in range(4))
begin.record()
free.wait_event(begin)
x.add_(1)
with torch.cuda.stream(free):
    x.add_(1)
    on_free.record()
with torch.cuda.stream(blocking):
    x.add_(1)
    on_blocking.record()
on_legacy.record()
print(*(round(time_of(event, begin), 4) for event in (on_free, on_blocking, on_legacy)))
"""
    assert in_a_process(tmp_path, code, clock="virtual", kernel_us=100) == "0.1 0.2 0.2"


def test_the_thousandth_launch_waits_for_room(tmp_path: Path) -> None:
    """A queue takes 1,020 launches behind the one that runs, as an H100's."""
    code = """
device.hang_next()
x.add_(1)
before = device.count("launches")
def launch():
    try:
        for _ in range(3000):
            x.add_(1)
    except RuntimeError:
        pass
thread = threading.Thread(target=launch)
thread.start()
until(lambda: device.count("launches") - before >= 1020)
time.sleep(0.3)
print(device.count("launches") - before, thread.is_alive())
device.fail(ECC)
thread.join()
print("let go")
"""
    assert in_a_process(tmp_path, code, clock="virtual", kernel_us=10) == "1020 True\nlet go"


@pytest.mark.parametrize(
    ("error", "words"), [("ILLEGAL_ADDRESS", "an illegal memory access"), ("ECC", "uncorrectable ECC error")]
)
def test_a_kernel_that_fails_is_told_late_and_for_good(tmp_path: Path, error: str, words: str) -> None:
    code = f"""
device.fail_next({error})
try:
    x.add_(1)  # told here only if the kernel has run by the time that its launch returns
except RuntimeError:
    pass
for action in (torch.cuda.synchronize, torch.cuda.synchronize, lambda: torch.empty(1 << 24, device="cuda")):
    try:
        action()
    except RuntimeError as told:
        print(str(told).splitlines()[0])
"""
    told = in_a_process(tmp_path, code, clock="virtual").splitlines()
    assert len(told) == 3
    assert all(words in line for line in told)


def test_devices_have_memory_of_their_own(tmp_path: Path) -> None:
    code = """
a = torch.tensor([1.0, 2.0]).to("cuda:1")
b = a.to("cuda:2")
print(torch.cuda.device_count(), b.device, b.tolist())
big = torch.empty(int(0.75 * 2**30), dtype=torch.uint8, device="cuda:1")
elsewhere = torch.empty(int(0.75 * 2**30), dtype=torch.uint8, device="cuda:2")
try:
    torch.empty(int(0.75 * 2**30), dtype=torch.uint8, device="cuda:1")
except torch.OutOfMemoryError:
    print("out of memory")
"""
    settings = {"STAND_IN_DEVICES": "4", "STAND_IN_MEMORY_GB": "1"}
    told = in_a_process(tmp_path, code, settings=settings)
    assert told == "4 cuda:2 [1.0, 2.0]\nout of memory"


@pytest.mark.parametrize("late", [False, True])
def test_memory_of_a_killed_process_may_be_freed_late(tmp_path: Path, late: bool) -> None:
    code = f"""
import os, signal, subprocess, sys
holder = subprocess.Popen([{sys.executable!r}, "-c", '''
import ctypes, time
runtime = ctypes.CDLL("libcudart.so.13")
assert runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(3 << 29)) == 0
print("held", flush=True)
time.sleep(100)
'''], stdout=subprocess.PIPE)
holder.stdout.readline()
free = lambda: torch.cuda.mem_get_info()[0] >> 29
print(free())
holder.kill()
holder.wait()
print(free())
"""
    settings = {"STAND_IN_MEMORY_GB": "2", "STAND_IN_FREED_AFTER_MS": "600000" if late else "0"}
    # 2 GiB less a context's few MiB and the holder's 1.5 GiB: no whole half GiB; all of it but that, when it is gone.
    assert in_a_process(tmp_path, code, settings=settings).split() == (["0", "0"] if late else ["0", "3"])


def test_a_graph_runs_what_was_captured_each_time_with_its_streams_beside_each_other(tmp_path: Path) -> None:
    code = """
from benchmarks.stand_in.device import compute_values
compute_values()
y = torch.ones(4, device="cuda")
side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    begun = torch.cuda.Event()
    begun.record()
    side.wait_event(begun)
    with torch.cuda.stream(side):
        for _ in range(5):
            x.add_(1)
    for _ in range(3):
        y.mul_(2)
    torch.cuda.current_stream().wait_stream(side)
    y.add_(x)
print(x.tolist()[0], y.tolist()[0])
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
for factor in (1, 2):
    device.slow_down(factor)
    begin.record()
    graph.replay()
    end.record()
    print(x.tolist()[0], y.tolist()[0], round(time_of(end, begin), 4))
"""
    told = in_a_process(tmp_path, code, clock="virtual", kernel_us=100, values=True).splitlines()
    assert told == ["0.0 1.0", "5.0 13.0 0.6", "10.0 114.0 1.2"]


def test_in_real_pace_the_device_takes_its_time(tmp_path: Path) -> None:
    code = """
device.kernel_us(200_000)
end = torch.cuda.Event()
began = time.monotonic()
x.add_(1)
end.record()
early = end.query()
end.synchronize()
print(early, time.monotonic() - began >= 0.2, end.query())
"""
    assert in_a_process(tmp_path, code, clock="real", kernel_us=1) == "False True True"
