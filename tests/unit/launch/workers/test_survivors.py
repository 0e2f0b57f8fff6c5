"""Workers that outlive their incarnation, as the launcher keeps them; small programs in the place of real workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.alone import alone
from tests.unit.launch.local_runs import ToldRun

from keepstep.core.staying import ADDRESS
from keepstep.launch.command.job import job_from_command_line
from keepstep.launch.workers.processes import Child
from keepstep.launch.workers.survivors import Survivors

# What a worker says when it is told to leave is its last argument.
WORKER = """
import json, os, socket, sys, time
launcher = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
launcher.connect("\\0" + os.environ["KEEPSTEP_STAYING"])
if sys.argv[1].startswith("at once "):
    launcher.send(sys.argv[1].removeprefix("at once ").encode())
    time.sleep(600)
launcher.send(b"stays")
assert launcher.recv(100) == b"leave"
if sys.argv[1] == "dies":
    sys.exit(5)
if sys.argv[1] != "silent":
    launcher.send(sys.argv[1].encode())
message, descriptors, _, _ = socket.recv_fds(launcher, 1 << 20, 2)
if message:
    json.dump({"environment": json.loads(message), "streams": len(descriptors)}, open(os.environ["OUT"], "w"))
time.sleep(600)
"""


class Node:
    """A launcher's surroundings, and workers that answer as they are told."""

    def __init__(self, folder: Path, *answers: str, patience_s: float = 60.0) -> None:
        run = ToldRun(folder, job_from_command_line(["train.py"], {"KEEPSTEP_LEAVE_S": str(patience_s)}))
        self.said, self.processes = run.said, run.processes
        self.ended: list[Child] = []
        self.survivors = Survivors(run)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.processes.reap)
        self.out = [folder / f"out-{number}" for number in range(len(answers))]
        environ = {**os.environ, **self.survivors.environment}
        assert set(self.survivors.environment) == {ADDRESS}
        self.children = {
            number: self.processes.start(
                f"rank {number}",
                (sys.executable, "-c", WORKER, answer),
                {**environ, "OUT": str(self.out[number])},
                on_exit=self.ended.append,
            )
            for number, answer in enumerate(answers)
        }

    async def until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def called(self, count: int) -> frozenset[int]:
        """Once all have said that they stay."""
        await self.until(lambda: len(self.survivors._connections) == count)
        return self.survivors.call(self.children)

    def take(self, number: int) -> Child | None:
        return self.survivors.take(number, {"A": "1", "RANK": str(number)}, (1, 2))

    async def end(self) -> None:
        pids = [child.pid for child in self.children.values() if child.alive]
        self.survivors.end()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await self.until(lambda: not any(child.alive for child in self.children.values()))


def test_who_has_left_gets_the_next_part(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, "left", "left")
        assert await node.called(2) == {0, 1}
        assert await node.survivors.left() == []
        assert node.survivors.pids == {child.pid for child in node.children.values()}
        assert node.take(0) is node.children[0]
        assert node.take(0) is None
        await node.until(lambda: node.out[0].exists() and node.out[0].read_text().endswith("}"))
        assert json.loads(node.out[0].read_text()) == {
            "environment": {"A": "1", "RANK": "0"},
            "streams": 2,
        }
        assert node.survivors.pids == {node.children[1].pid}
        assert node.said == []
        assert node.ended == []
        await node.end()

    alone(main)


@pytest.mark.parametrize(
    ("answer", "said", "status"),
    [
        ("silent", "rank 1 does not leave its training: it is ended", -9),
        ("refused compiled code", "rank 1 begins anew in another process: compiled code", -9),
        ("dies", "", 5),
    ],
)
def test_who_does_not_leave_is_replaced(tmp_path: Path, answer: str, said: str, status: int) -> None:
    async def main() -> None:
        node = Node(tmp_path, "left", answer, patience_s=1.0 if answer == "silent" else 60.0)
        assert await node.called(2) == {0, 1}
        assert await node.survivors.left() == []
        assert node.children[1].status == status
        assert node.said == ([said] if said else [])
        assert node.take(1) is None
        assert node.take(0) is node.children[0]
        await node.end()

    alone(main)


def test_who_cannot_stay_is_not_called_and_the_reason_is_told_once(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, "left", *(["at once refused its training runs in a thread"] * 2))
        await node.until(lambda: len(node.survivors._reasons) == 2)
        assert await node.called(1) == {0}
        assert node.said == ["ranks 1-2 begin anew in another process: its training runs in a thread"]
        await node.end()

    alone(main)


def test_a_process_without_a_session_is_not_called(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, "left")
        assert node.survivors.call(node.children) == frozenset()
        assert node.said == [
            "rank 0 begins anew in another process: no @keepstep.resilient training runs in it"
        ]
        await node.end()

    alone(main)


def test_one_that_dies_while_it_waits_is_not_taken(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, "left")
        await node.called(1)
        await node.survivors.left()
        os.kill(node.children[0].pid, signal.SIGKILL)
        await node.until(lambda: not node.survivors.pids)
        assert node.take(0) is None
        await node.end()

    alone(main)


def test_all_end_with_the_launcher_s_last_word(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path, "left")
        await node.called(1)
        await node.survivors.left()
        node.survivors.end()
        await node.until(lambda: not node.children[0].alive)
        assert node.children[0].status == -9

    alone(main)
