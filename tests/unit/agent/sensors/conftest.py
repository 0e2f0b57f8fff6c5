"""Processes that have mapped what is named like certain libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.agent.sensors.processes import ProcessId, identify

MAPS = """
import mmap, os, sys
kept = []
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
print("ready", flush=True)
sys.stdin.read()
"""
Start = Callable[..., ProcessId]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(*libraries: str, shell: bool = False, **environ: str) -> ProcessId:
        paths: list[str] = []
        for library in libraries:
            path = tmp_path / library
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"library")
            paths.append(str(path))
        words = [sys.executable, "-c", MAPS, *paths]
        if shell:
            words = ["sh", "-c", '"$@"; exit', "sh", *words]
        clean = {name: value for name, value in os.environ.items() if "AUTOLOAD" not in name}
        process = subprocess.Popen(
            words, env={**clean, **environ}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        found = identify(process.pid)
        assert found is not None
        return found

    yield begin
    for process in started:
        process.communicate()
