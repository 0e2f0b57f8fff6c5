"""Builds and runs the native stress tests with whatever compiler is here; the fast way round, see native/tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[3] / "native" / "tests"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
CANNOT_TRACE = 77

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (set CXX)")


def build(source: str, where: Path, *flags: str) -> Path:
    assert COMPILER is not None
    program = where / source.removesuffix(".cpp")
    argv = [COMPILER, "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    done = subprocess.run([*argv, str(NATIVE / source), "-o", str(program)], capture_output=True, text=True)
    if done.returncode != 0 and flags and "san" in done.stderr:
        pytest.skip(f"this compiler has no {' '.join(flags)}")
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *arguments: object) -> str:
    done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, timeout=120)
    if done.returncode == CANNOT_TRACE:
        pytest.skip("ptrace is not allowed here")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run with this kernel's address layout")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def kill_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("stress_kill.cpp", tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize("records", [64, 1024])
def test_many_threads_and_readers(tmp_path: Path, records: int) -> None:
    run(build("stress_threads.cpp", tmp_path), 4, 3, 20_000, records)


@pytest.mark.long
def test_many_threads_under_the_thread_sanitizer(tmp_path: Path) -> None:
    run(build("stress_threads.cpp", tmp_path, "-fsanitize=thread"), 4, 2, 5_000, 64)


@pytest.mark.long
def test_memory_and_undefined_behaviour(tmp_path: Path) -> None:
    run(build("stress_threads.cpp", tmp_path, "-fsanitize=address,undefined"), 2, 2, 5_000, 64)


def test_every_instruction_of_an_operation_leaves_a_right_ring(kill_program: Path) -> None:
    assert "instructions" in run(kill_program, "step")


def test_a_writer_killed_between_any_instructions_is_succeeded(kill_program: Path) -> None:
    assert "taken over" in run(kill_program, "takeover", 7)


def test_threads_killed_at_random_moments(kill_program: Path) -> None:
    assert "20 kills" in run(kill_program, "random", 20)
