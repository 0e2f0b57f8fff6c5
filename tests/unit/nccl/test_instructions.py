"""What a record and a call through the shim cost in instructions, which no other load of the machine changes.

The limits are a sixth above what g++ 12 makes of it at -O2; who goes over them looks why, or raises them on purpose.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.unit.nccl.shim import COMPILER, NATIVE, command

from keepstep.launch.workers.rings import preload, shim

CALLGRIND = shutil.which("valgrind")
RECORD, SHIM_CALL = 350, 720

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (set CXX)"),
    pytest.mark.skipif(CALLGRIND is None, reason="no valgrind"),
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="the limits are those of x86-64"),
]


def instructions(program: list[object], environment: dict[str, str]) -> int:
    argv = [CALLGRIND, "--tool=callgrind", "--callgrind-out-file=/dev/null", *program]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])


def each(program: Path, *arguments: str, **environment: str) -> float:
    """Of one more of what the program does so many times."""
    few, many = 20_000, 60_000
    took = [instructions([program, str(n), *arguments], {**os.environ, **environment}) for n in (few, many)]
    return (took[1] - took[0]) / (many - few)


def test_a_record(tmp_path: Path) -> None:
    program = tmp_path / "bench"
    command(COMPILER, "-std=c++17", "-O2", NATIVE / "tests/bench.cpp", "-o", program, "-pthread")
    assert each(program) <= RECORD


@pytest.mark.long
def test_a_call_through_the_shim(tmp_path: Path, rings: list[int]) -> None:
    library = shim()
    assert library is not None
    stand_in, program = tmp_path / "libnccl.so.2", tmp_path / "program"
    compiled = (COMPILER, "-std=c++17", "-O2")
    command(
        *compiled,
        NATIVE / "tests/stand_in_nccl.cpp",
        "-o",
        stand_in,
        "-shared",
        "-fPIC",
        "-Wl,-soname,libnccl.so.2",
    )
    linked = (stand_in, f"-Wl,-rpath,{tmp_path}", "-pthread")
    command(*compiled, NATIVE / "tests/nccl_program.cpp", "-o", program, *linked)
    watched = {"KEEPSTEP_RING": f"/proc/{os.getpid()}/fd/{rings[0]}", "RANK": "0", "WORLD_SIZE": "1"}
    without = each(program, "bench")
    assert each(program, "bench", **watched, **preload({}, library)) - without <= SHIM_CALL
