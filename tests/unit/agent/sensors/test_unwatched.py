"""Real processes that map what is named like torch's library and our part, or only one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from keepstep.agent.sensors.processes import ProcessId, identify
from keepstep.agent.sensors.unwatched import UnwatchedSensor, why_unwatched

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


TORCH, OURS = "site/torch/lib/libtorch_python.so", "site/keepstep/ring/_native.cpython-311.so"
OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def test_who_is_not_watched(start: Start) -> None:
    assert why_unwatched(start()) == ("", 0.0)
    assert why_unwatched(start(OURS, TORCH, **OFF)) == ("", 0.0)  # keepstep was imported by hand
    reason, soon_s = why_unwatched(start(TORCH, **OFF))
    assert reason.startswith("not watched: TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading")
    reason, late_s = why_unwatched(start(TORCH))
    assert reason.startswith(
        "not watched: torch has not loaded keepstep's part: install keepstep for the Python of the script"
    )
    assert f"{os.path.realpath(sys.executable)}, torch in " in reason
    assert soon_s < late_s
    assert why_unwatched(start(TORCH, shell=True, **OFF)) == (why_unwatched(start(TORCH, **OFF))[0], late_s)


def test_it_is_believed_once_it_has_lasted_and_forgotten_when_the_ring_is_claimed(start: Start) -> None:
    sensor, workers = UnwatchedSensor(), {0: start(TORCH, **OFF), 1: start(TORCH), 2: start(OURS, TORCH)}
    seen: list[list[int]] = []
    for second in range(100):
        sensor.look(second, workers)
        seen.append(sorted(sensor.reasons))
    assert seen[0] == []
    assert seen[10] == [0]
    assert seen[50] == [0]
    assert seen[-1] == [0, 1]
    sensor.look(200, {1: workers[1]})
    assert sorted(sensor.reasons) == [1]
