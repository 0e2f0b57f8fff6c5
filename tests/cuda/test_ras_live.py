"""Where torch's recorder is off, NCCL's RAS is asked once the job hangs, and who is behind is named by its counts."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest
from benchmarks.stand_in.faults import Fault
from benchmarks.stand_in.launch import TRAIN, start

BEHIND = re.compile(r"communicator 0x\w+ has launched: .*of rank 1\b")


def verdict(folder: Path, address: str, within_s: float) -> str:
    """What the console says once rank 1's host has hung; of the last verdict that came within ``within_s``."""
    settings = {"NCCL_RAS_ADDR": address, "TORCH_FR_BUFFER_SIZE": "0"}
    fault = Fault("hang", rank=1, step=40, where="backward")
    words = ["--layout", "ddp", "--steps", "400"]
    with start(TRAIN, words, folder, ranks=2, faults=[fault], kernel_us=500, settings=settings) as job:
        until = time.monotonic() + within_s
        while time.monotonic() < until and not BEHIND.search(job.console()):
            time.sleep(0.5)
        return job.console()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.long
def test_who_is_behind_by_ras_is_named(tmp_path: Path, free_port: int) -> None:
    console = verdict(tmp_path, f"localhost:{free_port}", 110)
    told = console[console.rindex("HANG ") :]
    assert re.search(r"culprit +rank 1 ", told), console
    assert "confidence medium" in told
    assert BEHIND.search(told), console


@pytest.mark.long
def test_a_service_that_never_answers_costs_nothing_but_what_it_would_have_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        console = verdict(tmp_path, f"localhost:{silent.getsockname()[1]}", 55)
    assert "HANG " in console
    assert not BEHIND.search(console)
    silent_rank = re.findall(r"culprit +rank (\d) ", console)
    assert set(silent_rank) <= {"1"}, console
