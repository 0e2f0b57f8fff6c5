"""Builds the shim, stand-ins for NCCL and for CUDA's driver, and a library that is linked to NCCL as torch is.

Ranks call through it.
Whatever is called here is a test double on host memory (``native/tests/stand_in_nccl.cpp``): no GPU, no NCCL.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[3] / "native"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

PRELUDE = """
import ctypes, os, sys, threading
folder, mode = sys.argv[1], sys.argv[2]
nccl = ctypes.CDLL(f"{folder}/libcaller.so", mode=getattr(ctypes, mode))
FLOAT32, SUM = 7, 0
class Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]
def good(result):
    assert result == 0, result
def floats(*values):
    return (ctypes.c_float * len(values))(*values)
def size(n):
    return ctypes.c_size_t(n)
STREAM = ctypes.c_void_p(0x10)
def make_id():
    made = Id(); good(nccl.caller_ncclGetUniqueId(ctypes.byref(made))); return made
def init(id, ranks, rank):
    comm = ctypes.c_void_p()
    good(nccl.caller_ncclCommInitRank(ctypes.byref(comm), ranks, id, rank))
    return comm
def all_reduce(comm, *values, stream=STREAM):
    data = floats(*values)
    result = nccl.caller_ncclAllReduce(data, data, size(len(values)), FLOAT32, SUM, comm, stream)
    return list(data) if result == 0 else result
"""


def command(*arguments: object) -> None:
    done = subprocess.run(list(map(str, arguments)), capture_output=True, text=True)
    if done.returncode != 0 and "san" in done.stderr and "cannot find" in done.stderr:
        pytest.skip("this compiler has no such sanitizer")
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True, slots=True)
class Built:
    """Where the three libraries lie."""

    folder: Path

    @property
    def shim(self) -> Path:
        return self.folder / "libkeepstep_nccl.so"

    def environment(
        self, ring: int | str | None, rank: int = 0, world_size: int = 1, **more: str
    ) -> dict[str, str]:
        """Of a watched worker; ``ring`` None: of one that is not watched, but has the shim."""
        path = f"/proc/{os.getpid()}/fd/{ring}" if isinstance(ring, int) else ring
        ours = {
            "LD_PRELOAD": str(self.shim),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            **({} if path is None else {"KEEPSTEP_RING": path}),
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
        return {**kept, **ours, **more}

    def start(
        self, script: str, environment: dict[str, str], *arguments: object, mode: str = "RTLD_LOCAL"
    ) -> subprocess.Popen[str]:
        """A process that has ``PRELUDE``; ``mode``: how it loads the library that is linked to NCCL."""
        argv = [sys.executable, "-c", PRELUDE + script, self.folder, mode, *map(str, arguments)]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def run(
        self, script: str, environment: dict[str, str], *arguments: object, mode: str = "RTLD_LOCAL"
    ) -> tuple[str, str]:
        """Run it to its end; what it wrote to stdout and stderr."""
        (done,) = self.together([self.start(script, environment, *arguments, mode=mode)])
        return done

    @staticmethod
    def together(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[str, str]]:
        """Wait for all; none outlives this."""
        try:
            said = [process.communicate(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, (_, stderr) in zip(processes, said, strict=True):
            assert process.returncode == 0, stderr
        return said


def build(folder: Path, *flags: str) -> Built:
    """Compile all; ``flags`` go to each."""
    assert COMPILER is not None
    library = (COMPILER, "-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", *flags)
    runtime = () if any("sanitize" in flag for flag in flags) else ("-static-libstdc++", "-static-libgcc")
    version = f"-Wl,--version-script={NATIVE / 'nccl_shim.map'}"
    command(
        *library, NATIVE / "nccl_shim.cpp", "-o", folder / "libkeepstep_nccl.so", *runtime, version, "-ldl"
    )
    stand_in = folder / "libnccl.so.2"
    command(
        *library, NATIVE / "tests/stand_in_nccl.cpp", "-o", stand_in, "-Wl,-soname,libnccl.so.2", "-pthread"
    )
    command(
        *library,
        NATIVE / "tests/stand_in_cuda.cpp",
        "-o",
        folder / "libcuda.so.1",
        "-Wl,-soname,libcuda.so.1",
        "-pthread",
    )
    caller = folder / "libcaller.so"
    command(*library, NATIVE / "tests/nccl_caller.cpp", "-o", caller, stand_in, "-Wl,-rpath,$ORIGIN")
    return Built(folder)
