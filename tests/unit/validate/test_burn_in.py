"""The burn-in on the CPU, and with operands and memory that were damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from keepstep.validate import burn_in as burning  # noqa: E402


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burning, "_CPU_SIZE", 64)
    monkeypatch.setattr(burning, "_MOST_CPU_BYTES", 8 << 20)


def test_a_sound_device() -> None:
    found = burning.burn_in("cpu", 0.05)
    assert (found.device, found.errors, found.missing) == ("CPU", (), ())
    assert {(one.test, one.unit) for one in found.figures} == {("fp32", "TFLOP/s"), ("copy", "GB/s")}
    assert all(one.value > 0 for one in found.figures)
    assert found.products > 0
    assert found.checked_bytes > 0


def test_products_that_differ_are_counted() -> None:
    products = burning._Products(0, "cpu")
    left, _, _, _ = products._kinds["fp32"]
    assert list(products.run(0.0)) == []
    left[5, 7] += 1  # from now on one row is wrong
    (told,) = products.run(0.0)
    assert told.endswith(" results of equal fp32 products differed")
    assert int(told.split()[0]) > 0


def test_a_device_that_computes_wrongly_from_the_start_is_told_by_the_host() -> None:
    products = burning._Products(0, "cpu")
    _, _, first, _ = products._kinds["fp32"]
    first[0, 0] += 1
    assert any("is not that of the host" in told for told in products.run(0.0))


def test_memory_that_changed_is_counted() -> None:
    memory = burning._Memory(0, "cpu")
    assert list(memory.run(0.0)) == []
    memory._blocks[0][3] ^= 1 << 17
    (told,) = memory.end()
    assert told.startswith("1 of ")


def test_whole_numbers_are_summed_exactly_in_every_order() -> None:
    """The largest possible sum is below what 32-bit floats count exactly."""
    assert burning._LARGEST**2 * burning._GPU_SIZE < 1 << 24


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "keepstep.validate.burn_in", *arguments]
    listening, lifeline = os.pipe()
    with os.fdopen(listening), os.fdopen(lifeline, "w"):
        return subprocess.run(
            command, stdin=listening, capture_output=True, text=True, check=False, timeout=250
        )


def test_the_program_ends_when_its_parent_does() -> None:
    command = [sys.executable, "-m", "keepstep.validate.burn_in", "cpu", "3600"]
    listening, lifeline = os.pipe()
    with os.fdopen(listening), subprocess.Popen(command, stdin=listening, stdout=subprocess.DEVNULL) as child:
        os.close(lifeline)
        assert child.wait(200) == 1


def test_the_program_says_so_where_there_is_no_such_device() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    found = json.loads(program("cuda:5", "1").stdout)
    assert (found["device"], found["errors"]) == ("GPU 5", [])
    assert "is built without CUDA" in found["missing"][0]


@pytest.mark.parametrize("seconds", ["nan", "-1", "1e9"])
def test_the_program_refuses_other_times(seconds: str) -> None:
    done = program("cpu", seconds)
    assert done.returncode == 1
    assert "give seconds" in done.stderr
