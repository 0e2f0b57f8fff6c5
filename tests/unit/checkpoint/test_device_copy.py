"""Snapshots of what lies on a CUDA device, over a stand-in for its driver whose memory is the host's: no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from keepstep.checkpoint import native

NATIVE = Path(__file__).parents[3] / "native"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (set CXX)")

PRELUDE = """
import ctypes, sys, time
from array import array
import numpy as np
from keepstep.checkpoint import native
cuda = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
cuda.cuCtxSetCurrent(ctypes.c_void_p(0x77))
STREAM = 0x10
def busy(seconds):
    cuda.stand_in_launch(ctypes.c_void_p(STREAM), ctypes.c_uint64(int(seconds * 1e9)))
def numbers(count, seed=1):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)
class Taken:
    def __init__(self, *pieces, threads=2):
        plan, at = array("Q"), 0
        for source, bits in pieces:
            plan.extend((source.ctypes.data, at, source.nbytes, bits))
            at += (source.nbytes + 63) // 64 * 64
        self.pieces = pieces
        self.slot = bytearray(native.slot_bytes(at, 2, len(pieces)))
        self.snapshot = native.Snapshot(
            self.slot, plan, header=b"{}", data_bytes=at, step=5, incarnation=1, threads=threads, stream=STREAM
        )
    def sealed(self):
        return int.from_bytes(self.slot[:8], "little") == native.MAGIC
    def has(self, place, value):
        at = sum((one.nbytes + 63) // 64 * 64 for one, _ in self.pieces[:place]) + native.DATA_OFFSET
        return bytes(self.slot[at : at + value.nbytes]) == value.tobytes()
    def whole(self):
        good = all(self.has(i, one) for i, (one, _) in enumerate(self.pieces))
        return good and self.sealed() and list(self.snapshot.sums()) == [native.checksum(one) for one, _ in self.pieces]
"""


def library(folder: Path, *flags: str) -> Path:
    path = folder / "libcuda.so.1"
    options = ["-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1", *flags]
    source = str(NATIVE / "tests/stand_in_cuda.cpp")
    subprocess.run([str(COMPILER), source, "-o", str(path), *options], check=True)
    return path


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library(tmp_path_factory.mktemp("cuda"))


def run(driver: Path, script: str) -> None:
    argv = [sys.executable, "-c", PRELUDE + script, str(driver)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("threads", [1, 4])
def test_every_byte_comes_with_its_checksum(driver: Path, threads: int) -> None:
    """More than the ring holds, small and large ones, on the host and on the device."""
    run(
        driver,
        f"""
assert native.has_cuda()
sizes = [3, 0, 1000, (1 << 20) + 3, 100 << 20, 8 << 20, 64, 17 << 20]
U, D = native.URGENT, native.ON_DEVICE
for kinds in ([0], [D], [U | D], [U, D | U, 0, D]):
    sources = [numbers(size, seed) for seed, size in enumerate(sizes)]
    taken = Taken(*((one, kinds[i % len(kinds)]) for i, one in enumerate(sources)), threads={threads})
    taken.snapshot.wait()
    assert taken.whole() and taken.snapshot.finished
assert cuda.stand_in_wrong() == 0
""",
    )


def test_it_is_read_once_the_stream_has_done_what_was_on_it(driver: Path) -> None:
    run(
        driver,
        """
urgent, other = numbers(3 << 20), numbers(3 << 20, 2)
busy(1.0)
taken = Taken((urgent, native.URGENT | native.ON_DEVICE), (other, native.ON_DEVICE))
urgent[:] = 7  # what the stream is still at
other[:] = 8
assert not taken.sealed()
taken.snapshot.wait(True)
assert taken.has(0, urgent)
taken.snapshot.wait()
assert taken.whole()
urgent[:] = 9
assert not taken.has(0, urgent)
""",
    )


def test_another_threads_capture_is_left_alone(driver: Path) -> None:
    run(
        driver,
        """
busy(0.3)
taken = Taken((numbers(20 << 20), native.ON_DEVICE))
cuda.stand_in_capture(ctypes.c_void_p(0x99), 1)
taken.snapshot.wait()
assert taken.whole() and cuda.stand_in_wrong() == 0
""",
    )


@pytest.mark.parametrize("copies", [0, 1, 5])
def test_a_device_that_breaks_leaves_nothing_sealed(driver: Path, copies: int) -> None:
    """Before its first copy, and later; what comes after it is whole again."""
    run(
        driver,
        f"""
cuda.stand_in_copies(ctypes.c_int64({copies}))
source = numbers(90 << 20)
taken = Taken((source, native.ON_DEVICE), (numbers(100), native.URGENT))
try:
    taken.snapshot.wait()
except RuntimeError as error:
    assert "CUDA_ERROR_LAUNCH_FAILED" in str(error), error
else:
    raise AssertionError("it did not say so")
taken.snapshot = None
assert not taken.sealed()
cuda.stand_in_mend()
again = Taken((source, native.ON_DEVICE))
again.snapshot.wait()
assert again.whole()
""",
    )


def test_without_a_context_it_is_refused(driver: Path) -> None:
    run(
        driver,
        """
cuda.cuCtxSetCurrent(None)
try:
    Taken((numbers(100), native.ON_DEVICE))
except RuntimeError as error:
    assert "context" in str(error)
else:
    raise AssertionError("it was not refused")
""",
    )


def test_without_cuda_it_is_refused() -> None:
    if native.has_cuda():
        pytest.skip("there is CUDA")
    data = bytearray(64)
    with pytest.raises(RuntimeError, match="CUDA"):
        native.Snapshot(
            bytearray(8192), array("Q", (id(data), 0, 64, native.ON_DEVICE)), header=b"", data_bytes=64, step=1,
            incarnation=1,
        )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("flags", ["-fsanitize=thread", "-fsanitize=address,undefined"])
def test_under_the_sanitizers(tmp_path: Path, flags: str) -> None:
    driver = library(tmp_path, flags)
    program = tmp_path / "program"
    options = ["-std=c++17", "-O1", "-g", "-pthread", "-Wno-tsan", flags, f"-Wl,-rpath,{tmp_path}"]
    sources = [str(NATIVE / "tests/snapshot_program.cpp"), str(driver)]
    subprocess.run([str(COMPILER), *sources, "-o", str(program), *options, "-ldl"], check=True)
    done = subprocess.run([program, "24", "1"], capture_output=True, text=True, timeout=280)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run with this kernel's address layout")
    assert (done.returncode, done.stderr) == (0, "")
