"""A companion that waits for its arguments, with a program in the place of the agent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.alone import alone

from keepstep.launch.node.programs import Companion
from keepstep.launch.node.waiting_program import Waiting
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.processes import Processes

PROGRAM = """
import json, sys, time
if sys.argv[1:] == ["--wait"]:
    print("waits", flush=True)
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)
    told = json.loads(line)
    log, words = open(told["log"], "a"), told["words"]
else:
    log, words = sys.stdout, sys.argv[1:]
print(sys.argv[1:], "does", words, file=log, flush=True)
time.sleep(600)
"""


class Node:
    """What a launcher has around it."""

    def __init__(self, folder: Path) -> None:
        (folder / "program.py").write_text(PROGRAM)
        self.log, self.command = folder / "log", (sys.executable, "-u", str(folder / "program.py"))
        self.processes = Processes(Guard("NO=such"))
        self.waiting = Waiting(self.command, os.environ, self.processes)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.processes.reap)

    def companion(self) -> Companion:
        return Companion(
            *("agent", lambda: [*self.command, "a", "b"], self.processes),
            gave_up=lambda _: None,
            log=self.log,
            waiting=self.waiting,
        )

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    async def said(self) -> list[str]:
        await self.until(lambda: self.log.exists() and self.log.read_text().endswith("\n"))
        return self.log.read_text().splitlines()


def test_the_one_that_waits_does_what_it_is_told_and_ends_as_any_companion(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        node.waiting.start()
        node.waiting.start()  # one is enough
        pid = node.waiting.pid
        await node.until(lambda: node.waiting.is_ready)
        agent = node.companion()
        agent.start()
        assert (agent.pid, node.waiting.pid) == (pid, None)
        assert await node.said() == ["['--wait'] does ['a', 'b']"]
        await agent.stop(5.0)
        assert agent.pid is None
        node.processes.guard.close()

    alone(main)


def test_without_one_or_when_it_has_died_the_program_is_started(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        node.waiting.start()
        assert node.waiting.pid
        os.kill(node.waiting.pid, signal.SIGKILL)
        await node.until(lambda: not node.waiting.pid)
        assert node.waiting.is_ready, "nobody is waited for"
        agent = node.companion()
        agent.start()
        assert await node.said() == ["['a', 'b'] does ['a', 'b']"]
        await agent.stop(5.0)
        node.processes.guard.close()

    alone(main)


def test_one_that_is_not_needed_is_ended(tmp_path: Path) -> None:
    async def main() -> None:
        node = Node(tmp_path)
        node.waiting.start()
        node.waiting.end()
        await node.until(lambda: not node.waiting.pid)
        node.processes.guard.close()

    alone(main)
