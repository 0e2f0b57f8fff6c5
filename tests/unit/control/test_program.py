"""The controller as a process: ready line, files, signals, restarts on the same port, the parent's death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.control.control_stand_ins import iterations

from keepstep import wire
from keepstep.core.finding import Finding


@contextlib.contextmanager
def controller(
    run: Path, *flags: str, listen: str = "127.0.0.1:0"
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "keepstep.control", "--run-dir", str(run), "--listen", listen),
            *("--secret-file", str(run / "secret"), *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        line = process.stdout.readline()
        yield process, json.loads(line)["port"] if line else 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


async def until(condition: Callable[[], object]) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 60)


class Node:
    """A launcher and an agent of one node, played by the test."""

    def __init__(self, port: int, secret: bytes) -> None:
        self.heard: list[wire.Message] = []
        key = wire.RunKey(secret)
        join = wire.Join("gpu-0", "127.0.0.1", 2, 29500, 0)
        address = ("127.0.0.1", port)
        quick = wire.ClientLimits(first_wait_s=0.01, longest_wait_s=0.05)
        self.launcher = wire.Client(
            address,
            key,
            role="launcher",
            greet=lambda: [wire.Hello("launcher", "gpu-0", 0, 10), join],
            message=self.heard.append,
            limits=quick,
        )
        self.agent = wire.Client(
            address,
            key,
            role="agent",
            greet=lambda: [wire.Hello("agent", "gpu-0", 0, 11)],
            message=self.answer,
            limits=quick,
        )

    def answer(self, message: wire.Message) -> None:
        self.heard.append(message)
        if isinstance(message, wire.ProfileRequest):
            rows = iterations((0, 1), 20, 33, onset=30, until=99, slow_rank=1, before_s=0.5, after_s=1.0)
            self.agent.send(wire.Profile(message.request, 0, rows))

    def beat(self, step: int) -> None:
        ranks = tuple(wire.RankBeat(rank, step, 2, 7, 0.5) for rank in (0, 1))
        self.agent.send(wire.Heartbeat(0, step, 1.0, ranks))

    def slow(self) -> None:
        for rank in (0, 1):
            self.agent.send(wire.Found(Finding("slow", rank, "gpu-0", 1.0, 32, 30, 0.5, 1.0)))

    def got(self, kind: type[wire.Message]) -> bool:
        return any(isinstance(message, kind) for message in self.heard)

    async def close(self) -> None:
        await self.launcher.close()
        await self.agent.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    wire.write_secret(tmp_path / "secret")
    return tmp_path


def test_a_whole_job(run: Path) -> None:
    """Placed, watched, a slowdown located by the shipped locators, killed and started again, ended."""

    async def play() -> None:
        secret = wire.read_secret(run / "secret")
        with controller(run) as (process, port):
            node = Node(port, secret)
            await until(lambda: node.got(wire.Placement))
            node.beat(32)
            node.slow()
            assert process.stderr is not None
            said = await asyncio.to_thread(process.stderr.readline)
            assert "SLOW      step 30" in said
            assert (run / "incidents" / "0001.json").exists()  # the file is written before the line is said
            process.kill()
            process.wait()
        node.heard.clear()
        with controller(run, listen=f"127.0.0.1:{port}") as (process, again):
            assert again == port
            await until(lambda: node.got(wire.Placement) and node.agent.connected)
            node.slow()
            for rank in (0, 1):
                node.agent.send(wire.Found(Finding("relief", rank, "gpu-0", 1.0, 47, 45, 1.0, 0.5)))
            await until(
                lambda: json.loads((run / "incidents" / "0001.json").read_bytes())["relief_step"] == 45
            )
            node.beat(50)
            status = run / "status.json"
            await until(lambda: status.exists() and json.loads(status.read_bytes())["newest_step"] == 50)
            node.launcher.send(wire.Ended(0, 0))
            await until(lambda: process.poll() is not None)
            assert process.returncode == 0
            assert node.got(wire.Stop)
        await node.close()
        told = json.loads((run / "status.json").read_bytes())
        assert (told["state"], told["world_size"], told["open_incidents"]) == ("done", 2, [])
        assert told["nodes"][0]["ranks"][1][:2] == [1, 50]
        assert sorted(path.name for path in (run / "incidents").iterdir()) == ["0001.json", "0001.txt"]
        incident = json.loads((run / "incidents" / "0001.json").read_bytes())
        assert [culprit["rank"] for culprit in incident["culprits"]] == [1]
        assert incident["status"] == "relieved"

    wire.run(play())


def test_sigterm_is_clean_and_decides_what_waits(run: Path) -> None:
    async def play() -> None:
        with controller(run) as (process, port):
            node = Node(port, wire.read_secret(run / "secret"))
            await until(lambda: node.got(wire.Placement))
            crash = Finding("crash", 1, "gpu-0", 1.0, -1, exit_code=137, message="killed by SIGKILL")
            node.launcher.send(wire.Found(crash))
            await node.launcher.drained(5.0)
            await until(lambda: (run / "controller.log").exists())
            node.launcher.send(wire.Ended(0, 137))
            await until(lambda: node.got(wire.Stop))
            process.send_signal(signal.SIGTERM)
            await until(lambda: process.poll() is not None)
            assert process.returncode == 0
            await node.close()

    wire.run(play())
    assert json.loads((run / "incidents" / "0001.json").read_bytes())["status"] == "ended"


def test_ends_with_its_parent(run: Path) -> None:
    """Its parent is killed outright; nothing tells it but the kernel."""
    script = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, '-m', 'keepstep.control', '--run-dir', {str(run)!r},"
        f" '--secret-file', {str(run / 'secret')!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
        except OSError:
            return True

    asyncio.run(until(gone))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--listen", "nonsense"), "is no address"),
        (("--tls-cert", "x"), "TLS wants all"),
        (("--listen", "203.0.113.7:1"), "cannot listen on 203.0.113.7:1"),
    ],
)
def test_says_what_is_wrong_and_ends_with_2(run: Path, flags: tuple[str, ...], message: str) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "keepstep.control", "--run-dir", str(run)),
            *("--secret-file", str(run / "secret"), *flags),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ},
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_secret_that_others_can_read_is_refused(run: Path) -> None:
    (run / "secret").chmod(0o644)
    with controller(run) as (process, port):
        assert port == 0
        assert process.wait(60) == 2
        assert process.stderr is not None
        assert "chmod 600" in process.stderr.read()
