"""Marks of iterations on the GPU, over a library in the place of the NCCL shim."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.unit.nccl.shim import COMPILER, command

SHIM = """
#include <unistd.h>
extern "C" void keepstep_device_mark(unsigned long long number, void* stream) {
  char byte = 0;
  const int end = static_cast<int>(reinterpret_cast<long>(stream));
  if (number == 7 && read(end, &byte, 1) != 1) _exit(1);
}
"""

JOB = """
import ctypes, os, sys, threading, types
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
from keepstep.capture import device_mark, internals
sys.modules["torch.cuda"] = types.SimpleNamespace(is_initialized=lambda: True)
taken, given = os.pipe()
internals.CURRENT_DEVICE, internals.CURRENT_STREAM = (lambda: 0), (lambda device: taken)
threading.Timer(0.2, lambda: os.write(given, b"x")).start()
device_mark.find()(7)
print("went on")
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_other_threads_run_while_a_mark_waits_for_a_gpu_that_hangs(tmp_path: Path) -> None:
    """CUDA lets a host wait that is too far ahead; with the interpreter's lock held nobody could say for what."""
    (tmp_path / "shim.cpp").write_text(SHIM)
    (tmp_path / "job.py").write_text(JOB)
    command(COMPILER, "-shared", "-fPIC", "-o", tmp_path / "shim.so", tmp_path / "shim.cpp")
    command("timeout", "60", sys.executable, tmp_path / "job.py", tmp_path / "shim.so")
