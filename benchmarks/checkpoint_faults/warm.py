"""Forks programs of the checkpoint campaigns into hosts from a process that has imported torch already.

An import of torch takes two CPU seconds, and a seed needs eight. What is forked is a process like any other: with
namespaces, sockets, memory and a death of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import NoReturn

from benchmarks.checkpoint_faults import node
from benchmarks.checkpoint_faults.nursery import become

_LIBC = ctypes.CDLL(None, use_errno=True)
_NAMESPACES = ("net", "uts", "time", "pid", "mnt")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # none but the first would be forked


class Warm:
    """Such a process; starts ``benchmarks.checkpoint_faults.node`` on hosts. For use by several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.checkpoint_faults.warm"],
            env={**os.environ, **_ONE_THREAD},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self, init_pid: int, console: Path, environment: Mapping[str, str], words: Sequence[str]
    ) -> None:
        """Run the module with these arguments where the process ``init_pid`` is; it ends with that one."""
        order = {"init": init_pid, "console": str(console), "environment": {**environment}, "words": [*words]}
        with self._lock:
            assert self._process.stdin
            assert self._process.stdout
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        if answer != "0\n":
            raise RuntimeError(f"a program could not be started on the host of process {init_pid}: {answer}")

    def close(self) -> None:
        """End it; what it started goes on."""
        self._process.kill()
        self._process.communicate()


def _enter(init_pid: int) -> None:
    """Go into the namespaces of a process; process numbers are those of later children."""
    descriptors = [os.open(f"/proc/{init_pid}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    folder = Path.cwd()
    for descriptor in descriptors:
        if _LIBC.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
    os.chdir(folder)


def _start(order: dict[str, object]) -> int:
    """Exit code of the process that goes into the namespaces and leaves a child there."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        _enter(int(str(order["init"])))
        if os.fork() == 0:
            _run(order)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run(order: dict[str, object]) -> NoReturn:
    os.setsid()
    words, environment = order["words"], order["environment"]
    assert isinstance(words, list)
    assert isinstance(environment, dict)
    become(lambda: node.main([str(word) for word in words]), environment, Path(str(order["console"])))


def main() -> None:
    """Orders on stdin, a JSON line each; exit codes on stdout."""
    import torch
    import torch._dynamo  # what the first optimizer would import
    import torch.distributed

    import keepstep.checkpoint  # noqa: F401

    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).step()
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("threads would not be forked")
    for line in sys.stdin:
        print(_start(json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
