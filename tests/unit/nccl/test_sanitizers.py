"""The shim under the sanitizers, in a program that is linked to it before NCCL: four ranks in four threads."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from tests.unit.nccl.shim import COMPILER, NATIVE, build, command

from keepstep.core.events import Flag, Kind
from keepstep.ring import RingReader, orders

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (set CXX)")


THREADS, MEMORY = "-fsanitize=thread", "-fsanitize=address,undefined"


@pytest.mark.parametrize(
    ("flags", "timed"),
    [
        (THREADS, False),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in ((THREADS, True), (MEMORY, False), (MEMORY, True))
        ),
    ],
)
def test_threads_groups_and_splits(tmp_path: Path, rings: list[int], flags: str, timed: bool) -> None:
    """``timed``: each thread has a context of its own on a stand-in for CUDA, and the GPU's times are taken."""
    built = build(tmp_path, flags)
    program = tmp_path / "program"
    libraries = (
        "-Wl,--no-as-needed",
        built.shim,
        tmp_path / "libnccl.so.2",
        *([tmp_path / "libcuda.so.1"] if timed else []),
        f"-Wl,-rpath,{tmp_path}",
        "-pthread",
    )
    command(COMPILER, "-std=c++17", "-g", flags, NATIVE / "tests/nccl_program.cpp", "-o", program, *libraries)
    descriptor = orders.create()
    page = orders.OrdersPage(descriptor)
    page.take_times(time.monotonic_ns() + 300 * 10**9)
    where = f"/proc/{os.getpid()}/fd/{descriptor}"
    environment = built.environment(rings[0], LD_PRELOAD="") | ({"KEEPSTEP_ORDERS": where} if timed else {})
    rounds = 300 if timed else 10  # the events are made meanwhile
    done = subprocess.run(
        [program, str(rounds)], env=environment, capture_output=True, text=True, timeout=240
    )
    page.close()
    os.close(descriptor)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run with this kernel's address layout")
    assert (done.returncode, done.stderr) == (0, "")
    records = RingReader(rings[0]).snapshot()
    if timed:
        assert (records["flags"] & Flag.TIMED).any()
        return  # it may end before its last times are read
    assert (records["kind"] == Kind.COLLECTIVE).sum() == 4 * 10 * 3
    assert len(RingReader(rings[0]).in_flight()) == 0
