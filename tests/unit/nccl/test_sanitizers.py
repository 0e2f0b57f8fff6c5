"""The shim under the sanitizers, in a program that is linked to it before NCCL: four ranks in four threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.unit.nccl.shim import COMPILER, NATIVE, build, command

from keepstep.core.events import Kind
from keepstep.ring import RingReader

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (set CXX)")


@pytest.mark.parametrize("flags", ["-fsanitize=thread", "-fsanitize=address,undefined"])
def test_threads_groups_and_splits(tmp_path: Path, rings: list[int], flags: str) -> None:
    built = build(tmp_path, flags)
    program = tmp_path / "program"
    libraries = (
        "-Wl,--no-as-needed",
        built.shim,
        tmp_path / "libnccl.so.2",
        f"-Wl,-rpath,{tmp_path}",
        "-pthread",
    )
    command(COMPILER, "-std=c++17", "-g", flags, NATIVE / "tests/nccl_program.cpp", "-o", program, *libraries)
    environment = {**built.environment(rings[0]), "LD_PRELOAD": ""}
    done = subprocess.run([program, "10"], env=environment, capture_output=True, text=True, timeout=240)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run with this kernel's address layout")
    assert (done.returncode, done.stderr) == (0, "")
    records = RingReader(rings[0]).snapshot()
    assert (records["kind"] == Kind.COLLECTIVE).sum() == 4 * 10 * 3
    assert len(RingReader(rings[0]).in_flight()) == 0
