"""Jobs started by these tests must hear signals, also when the tests run in the background or under nohup."""

import os
import signal
from pathlib import Path

import pytest

WARM = Path(__file__).parents[1] / "warm"

# A shell's background passes on that Ctrl-C is ignored, nohup that SIGHUP is; `keepstep run` respects both.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# `keepstep run` forks its workers, torch imported: tests/warm/sitecustomize.py says how. The length is room for the
# environment of a worker.
os.environ["KEEPSTEP_TEST_WARM"] = "x" * 16_384
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(WARM), os.environ.get("PYTHONPATH"))))


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start workers as users do, an interpreter each."""
    monkeypatch.setenv("KEEPSTEP_TEST_WARM", "")
