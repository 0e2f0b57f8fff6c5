"""libtorch's calls of getnameinfo are led past the resolver; that nobody is asked is shown in tests/e2e."""

from __future__ import annotations

import subprocess
import sys

MEET = """
import torch
from torch.distributed import TCPStore
from keepstep.worker import _numeric_peers
print(_numeric_peers.install() > 0, _numeric_peers.install() > 0)
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
other = TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)
other.set("a", "b")
print(store.get("a"))
"""
EARLY = "from keepstep.worker import _numeric_peers; print(_numeric_peers.install())"


def run(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


def test_a_store_serves_as_before() -> None:
    assert run(MEET) == "True True\nb'b'\n"


def test_without_torch_there_is_nothing_to_lead() -> None:
    assert run(EARLY) == "0\n"
