"""Whether a GPU has let go of the memory of ended workers, by a stand-in for NVIDIA's library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from keepstep.launch.workers.gpu_memory import Held, as_text, had, held

NATIVE = Path(__file__).parents[4] / "native" / "tests"
HERE = os.getpid()
GB = 10**9


@pytest.fixture(scope="module")
def dead() -> tuple[int, int]:
    """Two processes that have ended."""
    ended = [subprocess.Popen(["true"]) for _ in range(2)]
    for one in ended:
        one.wait()
    return ended[0].pid, ended[1].pid


def test_only_what_ended_processes_of_ours_have_is_held(dead: tuple[int, int]) -> None:
    first, second = dead
    answer = {"0": (60 * GB, [(HERE, 20 * GB)]), "3": (30 * GB, [(HERE, 5 * GB), (first, 41 * GB)])}
    assert list(held(answer, {first: "rank 5", second: "rank 6"})) == [Held(3, "rank 5", 41 * GB, True)]


def test_where_another_like_it_finds_room_none_is_missed(dead: tuple[int, int]) -> None:
    answer = {"0": (50 * GB, [(dead[0], 2 * GB)])}
    assert [one.is_missed for one in held(answer, {dead[0]: "rank 0"})] == [False]


def test_a_driver_may_not_tell_how_much(dead: tuple[int, int]) -> None:
    answer = {"0": (-1, [(dead[0], 2**64 - 1)]), "1": (-1, [(dead[1], 0)])}
    found = list(held(answer, {dead[0]: "survivor, rank 0", dead[1]: ""}))
    assert [(one.name, one.count, one.is_missed) for one in found] == [("rank 0", 0, False), ("", 0, False)]


def test_a_list_of_another_namespace_says_nothing(dead: tuple[int, int]) -> None:
    ours, stranger = dead
    assert list(held({"0": (0, [(ours, GB), (stranger, GB)])}, {ours: "rank 0"})) == []


def test_what_living_processes_have_is_known_where_the_driver_lists_this_namespace(
    dead: tuple[int, int],
) -> None:
    ours, stranger = dead
    answer = {"0": (0, [(HERE, 20 * GB), (ours, GB)]), "3": (-1, [(HERE, 5 * GB)])}
    assert had(answer, {ours: "rank 0"}) == {(0, HERE): 20 * GB, (3, HERE): 5 * GB}
    assert had(answer, {stranger: "rank 0"}) == {}
    assert had({"0": (0, [(HERE, 2**64 - 1)]), "1": (0, [(HERE, 0)])}, {}) == {}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([Held(3, "rank 5", 41 * GB, True)], "GPU 3: 41.0 GB of the process that ended (rank 5)"),
        (
            [Held(0, "rank 8", 2 * GB, True), Held(1, "rank 9", 3 * GB, True)],
            "GPUs 0-1: 5.0 GB of 2 processes that ended (ranks 8-9)",
        ),
        ([Held(0, "", 0, False)], "GPU 0: memory of the process that ended"),
    ],
)
def test_it_is_told_in_one_line(found: list[Held], text: str) -> None:
    assert as_text(found) == text


PROLOGUE = """
import asyncio, os, signal, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from keepstep.launch.workers import gpu_memory
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.processes import Processes

def card(pid):
    whole = Path(os.environ["STAND_IN_NVML"], "new")
    whole.write_text(f"1980 60 99 {pid} 0")
    whole.rename(whole.with_name("card-0"))

said = []
processes = Processes(Guard("NO=such"))
run = SimpleNamespace(job=SimpleNamespace(node="n"), processes=processes, say=said.append, warn=said.append)
memory = gpu_memory.GpuMemory(run)

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, processes.reap)
    worker = processes.start("rank 5", ["true"], os.environ, on_exit=lambda _: None)
    while worker.alive:
        await asyncio.sleep(0.01)
    card(worker.pid)
    memory.open()
    await test(worker)
    while memory.pids:
        await asyncio.sleep(0.01)
"""


def alone(code: str, folder: Path, library: Path | None) -> str:
    """What a process prints that has these GPUs."""
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(code) + "\nasyncio.run(main())"],
        env={**os.environ, "STAND_IN_NVML": str(folder), "LD_LIBRARY_PATH": str(library or "")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the driver's library."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no C++ compiler (set CXX)")
    folder = tmp_path_factory.mktemp("nvml")
    flags = ["-std=c++17", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1")]
    subprocess.run([compiler, str(NATIVE / "stand_in_gpu" / "nvml.cpp"), *flags], check=True)
    return folder


def test_it_waits_until_the_driver_lists_the_ended_worker_no_more(tmp_path: Path, library: Path) -> None:
    code = """
    async def test(worker):
        gpu_memory._SAID_AFTER_S = 0
        looks = []
        def over():
            looks.append(len(said))
            if len(looks) == 3:
                card(0)
            return False
        print(await memory.freed(over), looks, said)
    """
    told = "node n: GPU 0: memory of the process that ended (rank 5) is not free yet: its successor waits"
    assert alone(code, tmp_path, library) == f"[] [0, 1, 1] {[told]}"


def test_it_waits_no_longer_than_its_patience_nor_once_the_job_is_over(tmp_path: Path, library: Path) -> None:
    code = """
    async def test(worker):
        over = iter([False, True])
        print(await memory.freed(lambda: next(over)))
        memory.open()
        gpu_memory.PATIENCE_S = 0
        print(await memory.freed(lambda: False))
    """
    assert alone(code, tmp_path, library).splitlines() == [
        "[]",
        "[Held(gpu=0, name='rank 5', count=0, is_missed=False)]",
    ]


def test_a_driver_that_does_not_answer_is_not_waited_for(tmp_path: Path, library: Path) -> None:
    code = """
    async def test(worker):
        gpu_memory._ANSWER_S = 0.1
        os.kill(*memory.pids, signal.SIGSTOP)
        print(await memory.freed(lambda: False), "has not answered" in said[0])
    """
    assert alone(code, tmp_path, library) == "[] True"


def test_what_a_rank_had_while_it_ran_is_told_with_what_was_free_once_it_had_ended(
    tmp_path: Path, library: Path
) -> None:
    code = """
    async def test(worker):
        memory.close()
        while memory.pids:
            await asyncio.sleep(0.01)
        second = processes.start("survivor, rank 6", ["sleep", "60"], os.environ, on_exit=lambda _: None)
        answers = iter([{"3": (10, [(second.pid, 41)])}, {"3": (51, [])}])
        async def answer(driver, within_s):
            return next(answers, None) if driver.pids else None
        gpu_memory.GpuDriver.answer = answer
        memory.watch()
        memory.watch()
        await asyncio.sleep(0)
        print(memory.told(), len(memory.pids))
        os.kill(second.pid, signal.SIGKILL)
        while second.alive:
            await asyncio.sleep(0.01)
        memory.open()
        print(await memory.freed(lambda: False), memory.told())
        memory.watch()
        print(memory.told())
        memory.close()
    """
    freed = "FreedMemory(gpu=3, rank=6, held_bytes=41, free_bytes=51)"
    assert alone(code, tmp_path, library).splitlines() == ["() 1", f"[] ({freed},)", "()"]


def test_without_the_drivers_library_nothing_is_started(tmp_path: Path) -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is a driver: its library would be found")
    code = """
    async def test(worker):
        print(list(memory.pids), await memory.freed(lambda: False))
    """
    assert alone(code, tmp_path, None) == "[] []"
