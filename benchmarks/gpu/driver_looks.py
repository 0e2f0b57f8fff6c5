"""Looks at the GPU's memory through its driver, a hundred times a second, by the program that keepstep asks itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.gpu.judge import Look

from keepstep.launch.workers import gpu_holders

_PAUSE_S = 0.005


@contextmanager
def looks(gpu: int = 0) -> Iterator[list[Look]]:
    """The looks, as they come until the block's end; none where the driver cannot be asked."""
    words = [sys.executable, "-I", "-S", gpu_holders.__file__]
    found: list[Look] = []
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as asked:
        thread = threading.Thread(target=_look, args=(asked, str(gpu), found), daemon=True)
        thread.start()
        try:
            yield found
        finally:
            asked.kill()
            thread.join()


def _look(asked: subprocess.Popen[bytes], gpu: str, found: list[Look]) -> None:
    assert asked.stdin is not None
    assert asked.stdout is not None
    while True:
        try:
            os.write(asked.stdin.fileno(), b"\n")
        except OSError:
            return
        line = asked.stdout.readline()
        if not line.endswith(b"\n"):
            return
        free, those = json.loads(line).get(gpu, (-1, []))
        found.append(Look(time.time(), free, frozenset(pid for pid, _ in those)))
        time.sleep(_PAUSE_S)
