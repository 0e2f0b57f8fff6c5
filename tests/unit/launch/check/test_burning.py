"""Burn-in programs of all devices at once: what each says, and what is made of one that ends otherwise."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.core.node_row import Burnt
from keepstep.launch.check.burning import outcome, run_all

SAY = f"import sys; print({json.dumps(asdict(Burnt('GPU 0', 'H100', 1.0)))!r})"


def run(text: str, *devices: str, most_s: float = 60.0) -> tuple[Burnt, ...]:
    return run_all(devices or ("cuda:0",), 1.0, [sys.executable, "-c", text], most_s)


def test_what_it_says() -> None:
    assert run(SAY) == (Burnt("GPU 0", "H100", 1.0),)


def test_one_that_crashes_is_at_fault_and_one_that_was_killed_is_not() -> None:
    (crashed,) = run("import os; os.write(2, b'bad\\n'); os.abort()", "cuda:3")
    assert (crashed.device, crashed.errors) == ("GPU 3", ("its burn-in was ended by SIGABRT: bad",))
    (killed,) = run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (killed.errors, killed.missing) == ((), ("its burn-in ended with exit code -9 and no answer",))


@pytest.mark.parametrize(("device", "errors"), [("cuda:1", 1), ("cpu", 0)])
def test_one_that_hangs_is_killed_and_holds_up_no_other(device: str, errors: int) -> None:
    text = f"import sys, time; time.sleep(600 if {device!r} in sys.argv else 0); {SAY}"
    hung, other = run(text, device, "cuda:0", most_s=5.0)
    assert (len(hung.errors), len(hung.missing)) == (errors, 1 - errors)
    assert "has not ended after 5 s" in (hung.errors + hung.missing)[0]
    assert other.model == "H100"


def test_its_stdin_lasts_as_long_as_the_process_that_started_it() -> None:
    """Whoever reads it is told when that process is gone."""
    text = f"import os, select; ready, _, _ = select.select([0], [], [], 0.5); assert not ready; {SAY}"
    assert run(text) == (Burnt("GPU 0", "H100", 1.0),)


def test_without_the_program() -> None:
    (found,) = run_all(["cpu"], 1.0, ["/no/such/python"], 5.0)
    assert found.missing == ("its burn-in cannot be started: No such file or directory",)


@given(st.binary(max_size=200), st.binary(max_size=200), st.integers(-70, 255))
def test_no_answer_is_too_odd(out: bytes, err: bytes, code: int) -> None:
    found = outcome("GPU 1", code, out, err)
    assert isinstance(found, Burnt)
    assert all(len(text) < 400 for text in found.errors + found.missing)
