"""The workers of one incarnation, on real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.alone import alone
from tests.unit.launch.command.test_job import job
from tests.unit.launch.local_runs import ToldRun

from keepstep.launch.command.placement import ERROR_FILE, WorkerPlan
from keepstep.launch.workers.incarnation import Workers
from keepstep.launch.workers.restarts import Restarts
from keepstep.launch.workers.root_cause import Failure
from keepstep.launch.workers.streams import WorkerStreams

SLEEPS = "import time; time.sleep(600)"
LEAVES = "pass"
STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
open(OUT, "w").close()
time.sleep(600)
"""
LOSES = """
import json, os, sys
json.dump({"message": WORDS}, open(os.environ["TORCHELASTIC_ERROR_FILE"], "w"))
sys.exit(1)
"""


def loses(words: str, after: str = "") -> str:
    """A worker that fails with these words, once a file ``after`` is there."""
    wait = f"import os, time\nwhile {after!r} and not os.path.exists({after!r}): time.sleep(0.01)\n"
    return wait + LOSES.replace("WORDS", repr(words))


class Node:
    """Workers that run these programs, and what their owner is told."""

    def __init__(self, folder: Path, *programs: str, is_part: bool = False) -> None:
        self.folder = folder
        self.run = ToldRun(folder, job("train.py"))
        restarts = Restarts(self.run, os.environ, recovered=lambda _: None, raised=lambda _: None)
        plans = [
            WorkerPlan(
                rank,
                rank,
                (sys.executable, "-c", program.replace("OUT", repr(str(folder / f"out-{rank}")))),
                {ERROR_FILE: str(folder / f"error-{rank}.json")},
            )
            for rank, program in enumerate(programs)
        ]
        self.failed: list[int] = []
        self.told: list[tuple[int, int]] = []  # ranks and their status
        self.finished = False
        self.workers = Workers(
            plans,
            {rank: WorkerStreams(None, None, {}) for rank in range(len(programs))},
            self.run.processes,
            restarts,
            failed=lambda failure: self.failed.append(failure.rank),
            finished=self._finish,
            told=lambda failure: self.told.append((failure.rank, failure.status)),
            is_part=is_part,
        )
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.run.processes.reap)
        self.workers.start(os.environ)
        self.children = self.workers.alive

    def _finish(self) -> None:
        self.finished = True

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(6000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("waited too long")

    async def end(self) -> None:
        await self.workers.end(signal.SIGTERM, 30.0, asyncio.Event())


def test_a_worker_that_is_killed_for_its_hang_has_failed_before_others_can_fail_by_its_death(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        run = ToldRun(tmp_path, job("train.py"))
        restarts = Restarts(run, os.environ, recovered=lambda _: None, raised=lambda _: None)
        command = (sys.executable, "-c", SLEEPS)
        plans = [
            WorkerPlan(rank, rank, command, {ERROR_FILE: str(tmp_path / f"error-{rank}.json")})
            for rank in (0, 1)
        ]
        streams = {rank: WorkerStreams(None, None, {}) for rank in (0, 1)}
        told: list[Failure] = []
        workers = Workers(plans, streams, run.processes, restarts, failed=told.append, finished=lambda: None)
        workers.start(os.environ)
        first, second = workers.alive
        assert not workers.kill(1, first.pid, "another process")
        assert workers.kill(1, second.pid, "it hung")
        # Nothing was reaped yet: the kernel may take long to free the memory of the killed one.
        assert [(one.rank, one.message, one.by_keepstep) for one in told] == [(1, "it hung", True)]
        for child in (first, second):
            os.kill(child.pid, signal.SIGKILL)
        while any(child.alive for child in (first, second)):
            run.processes.reap()
        assert [one.rank for one in workers.failures] == [1, 0]

    alone(main)


def test_two_that_are_killed_at_once_are_both_told_and_none_that_the_launcher_ends(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, SLEEPS, SLEEPS, SLEEPS, STUBBORN)
        await node.until((tmp_path / "out-3").exists)
        for rank in (1, 2):
            os.kill(node.children[rank].pid, signal.SIGKILL)
        await node.until(lambda: node.failed)
        await node.end()
        assert sorted([*node.failed, *(rank for rank, _ in node.told)]) == [1, 2]
        assert {status for _, status in node.told} == {-9}
        late = [one.rank for one in node.workers.failures if one.late]
        assert late == [3], "it has a handler, so that it fails when it is asked to end"
        assert node.workers.blamed.rank in (1, 2)

    alone(main)


def test_one_that_is_killed_while_all_are_ended_is_told_too(tmp_path: Path) -> None:
    async def main() -> None:
        deaf = (
            "import signal, time; signal.signal(15, signal.SIG_IGN); open(OUT, 'w').close(); time.sleep(600)"
        )
        node = Node(tmp_path, deaf, "import sys; sys.exit(5)")
        await node.until((tmp_path / "out-0").exists)
        await node.until(lambda: node.failed)
        ending = asyncio.create_task(node.end())
        await asyncio.sleep(0.2)
        os.kill(node.children[0].pid, signal.SIGKILL)
        await ending
        assert (node.failed, node.told) == ([1], [(0, -9)])

    alone(main)


def test_what_dies_as_the_job_is_ended_is_told_to_nobody(tmp_path: Path) -> None:
    """As a scheduler ends a job: SIGTERM to all, then SIGKILL; ranks lose their connections meanwhile."""

    async def main() -> None:
        lost = STUBBORN.replace("sys.exit(3)", "lose()").replace("import", "def lose():\n    EXEC\nimport", 1)
        program = lost.replace("EXEC", f"exec({LOSES.replace('WORDS', repr('Connection reset by peer'))!r})")
        deaf = (
            "import signal, time; signal.signal(15, signal.SIG_IGN); open(OUT, 'w').close(); time.sleep(600)"
        )
        node = Node(tmp_path, program, deaf)
        await node.until(lambda: all((tmp_path / f"out-{rank}").exists() for rank in (0, 1)))
        ending = asyncio.create_task(node.end())
        await node.until(lambda: not node.children[0].alive)
        os.kill(node.children[1].pid, signal.SIGKILL)
        await ending
        assert (node.failed, node.told) == ([], [])
        assert [one.rank for one in node.workers.failures] == [0, 1]

    alone(main)


def test_the_launchers_signal_is_not_what_a_worker_with_an_error_has_died_of(tmp_path: Path) -> None:
    async def main() -> None:
        own = LOSES.replace("WORDS", repr("ValueError: boom")).replace("sys.exit(1)", "")
        stays = f"{own}\nopen(OUT, 'w').close()\n{SLEEPS}"
        node = Node(tmp_path, stays, loses("ValueError: boom", str(tmp_path / "out-0")))
        await node.until(lambda: node.failed)
        await node.end()
        assert (node.failed, node.told) == ([1], [(0, 1)])
        assert {one.rank: one.status for one in node.workers.failures} == {0: -signal.SIGTERM, 1: 1}

    alone(main)


def test_who_leaves_while_others_train_is_told_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, SLEEPS, LEAVES)
        await node.until(lambda: node.told)
        assert (node.failed, node.told, node.finished) == ([], [(1, 0)], False)
        await node.end()
        assert node.told == [(1, 0)]

    alone(main)


def test_the_last_one_to_end_well_has_not_left_early(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, LEAVES)
        await node.until(lambda: node.finished)
        assert (node.failed, node.told, node.workers.left) == ([], [], [])
        part = Node(tmp_path, LEAVES, is_part=True)
        await part.until(lambda: part.finished)
        assert part.told == [(0, 0)], "other nodes may still train"

    alone(main)


def test_who_leaves_just_after_its_connections_closed_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        leaves = "import time; open(OUT, 'w').close(); time.sleep(0.5)"
        node = Node(tmp_path, loses("Connection closed by peer", str(tmp_path / "out-1")), leaves)
        await node.until(lambda: node.failed)
        await node.workers.leaving(lambda: False)
        assert (node.failed, node.told) == ([0], [(1, 0)])
        await node.end()
        assert node.workers.blamed.rank == 1
        assert node.workers.first_left is node.workers.left[0]

    alone(main)


def test_who_says_that_it_leaves_is_waited_for_on_any_node(tmp_path: Path) -> None:
    async def main() -> None:
        leaves = "import time; open(OUT, 'w').close(); time.sleep(0.5)"
        node = Node(tmp_path, SLEEPS, leaves, is_part=True)
        await node.until((tmp_path / "out-1").exists)
        node.workers.leaves(1)
        await node.workers.leaving(lambda: True)
        assert node.told == [], "nothing is waited for"
        await node.workers.leaving(lambda: False)
        assert node.told == [(1, 0)]
        await node.end()
        assert node.workers.first_left is node.workers.left[0]

    alone(main)


def test_on_a_node_of_several_nobody_is_waited_for_that_says_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, loses("Connection closed by peer"), SLEEPS, is_part=True)
        await node.until(lambda: node.failed)
        looks: list[bool] = []
        await node.workers.leaving(lambda: bool(looks.append(True)))
        assert (len(looks), len(node.workers.alive)) == (1, 1)
        await node.end()

    alone(main)


def test_who_leaves_may_be_the_last_to_end(tmp_path: Path) -> None:
    async def main() -> None:
        leaves = "import time; open(OUT, 'w').close(); time.sleep(1)"
        node = Node(tmp_path, loses("Connection closed by peer", str(tmp_path / "out-1")), leaves)
        await node.until(lambda: not node.children[0].alive)
        await node.workers.leaving(lambda: False)
        assert (node.told, node.workers.blamed.rank) == ([(1, 0)], 1)

    alone(main)


def test_nobody_is_waited_for_where_a_timeout_or_an_own_error_came_first(tmp_path: Path) -> None:
    async def main() -> None:
        for words in ("RuntimeError: Operation timed out!", "ValueError: boom"):
            node = Node(tmp_path, loses(words), SLEEPS)
            await node.until(lambda: node.failed)  # noqa: B023
            await node.workers.leaving(lambda: False)
            assert node.workers.alive, words
            await node.end()
            assert (node.told, node.workers.blamed.rank) == ([], 0)
            (tmp_path / "error-0.json").unlink()

    alone(main)
