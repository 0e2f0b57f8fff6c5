"""The agent beside a real two-rank Gloo job (emulated compute), with a controller's end that only listens and asks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from keepstep import wire
from keepstep.core.events import Op, Phase
from keepstep.ring import RingReader
from keepstep.wire.secret import UNNAMED

pytestmark = pytest.mark.e2e
HERE = Path(__file__).parent
T = TypeVar("T")


class Controller:
    """Collects what agents say, on a thread of its own; ``ask`` sends to the newest one."""

    def __init__(self, secret: bytes, run_id: str = UNNAMED) -> None:
        self.heard: list[Any] = []
        self.port = 0
        self._agent: Any = None
        self._loop = asyncio.new_event_loop()
        self._key = wire.RunKey(secret, run_id)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def ask(self, message: wire.Message) -> None:
        self._loop.call_soon_threadsafe(self._agent.send, message)

    def hang_up(self) -> None:
        """Close the connection to the newest agent, which makes another one."""
        self._loop.call_soon_threadsafe(self._agent.close)

    def of(self, kind: type[T]) -> list[T]:
        return [message for message in list(self.heard) if isinstance(message, kind)]

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.close(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _opened(self, connection: Any) -> None:
        self._agent = connection
        connection.send(wire.Welcome(os.getpid()))

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        callbacks = wire.ServerCallbacks(
            message=lambda _, message: self.heard.append(message), opened=self._opened, closed=lambda *_: None
        )
        self._server = self._loop.run_until_complete(wire.serve("127.0.0.1", self.port, self._key, callbacks))
        self.port = self._server.port
        self._ready.set()
        self._loop.run_forever()


class Job:
    """A launcher with its workers and agent."""

    def __init__(self, run_dir: Path, controller: Controller, *arguments: str) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [
                sys.executable, str(HERE / "agent_launcher.py"), str(run_dir), "2", str(controller.port),
                str(HERE / "agent_train.py"), *arguments,
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.pids = self.next_pids()

    def next_pids(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        self.pids = json.loads(self.process.stdout.readline())
        return self.pids

    def clock(self, rank: int) -> list[float]:
        for path in self.run_dir.glob(f"clock.{rank}.*"):
            return json.loads(path.read_text())
        return []

    def steps(self) -> list[dict[str, Any]]:
        path = self.run_dir / "nodes" / "0" / "iterations.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller(wire.write_secret(tmp_path / "secret"))
    yield made
    made.close()


@pytest.fixture
def start(tmp_path: Path, controller: Controller) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def begin(*arguments: str) -> Job:
        jobs.append(Job(tmp_path, controller, *arguments))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.end()


def until(found: Callable[[], T], limit_s: float = 90.0) -> T:
    deadline = time.monotonic() + limit_s
    while not (value := found()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return value


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.quiet
def test_a_slow_rank_is_found_and_its_profile_shows_who(
    start: Callable[..., Job], controller: Controller, tmp_path: Path
) -> None:
    job = start("60", str(tmp_path / "clock"), "slow=1:30:2", "evaluate=5")
    found = until(lambda: [m.finding for m in controller.of(wire.Found) if m.finding.kind == "slow"])
    assert abs(found[0].onset_step - 30) <= 2
    assert found[0].after_s / found[0].before_s == pytest.approx(2.0, abs=0.3)
    until(lambda: len(job.steps()) == 60)

    controller.ask(wire.ProfileRequest(7, 0, 99))
    profile = until(lambda: controller.of(wire.Profile))[0]
    assert profile.request == 7

    def self_s(rank: int, first: int, last: int) -> float:
        found = sorted(
            one.self_s for one in profile.iterations if one.rank == rank and first <= one.step < last
        )
        return found[len(found) // 2]

    assert self_s(1, 34, 58) / self_s(1, 6, 28) > 1.7
    assert self_s(0, 34, 58) / self_s(0, 6, 28) < 1.15
    assert {stream.op for one in profile.iterations for stream in one.streams} >= {Op.ALLREDUCE}
    assert any(group.members == (0, 1) for message in controller.of(wire.Groups) for group in message.groups)

    # The iteration times are the script's own, with an evaluation before every fifth step.
    errors = []
    for rank in (0, 1):
        clock = until(lambda rank=rank: job.clock(rank)[59:] and job.clock(rank))
        errors += [line["ranks"][str(rank)]["d"] / clock[line["step"]] - 1 for line in job.steps()[1:]]
    assert sorted(map(abs, errors))[len(errors) // 2] < 0.005
    assert [line["step"] for line in job.steps()] == list(range(60))
    assert [line["ranks"]["0"]["eval"] > 0.09 for line in job.steps()] == [
        step > 0 and step % 5 == 0 for step in range(60)
    ]


@pytest.mark.quiet
def test_a_hang_is_found_and_its_states_show_who_never_entered(
    start: Callable[..., Job], controller: Controller, tmp_path: Path
) -> None:
    # Three looks at a backward pass, at four looks a second, teach what is usual there: 100 steps are 6 s.
    start("200", str(tmp_path / "clock"), "hang=1:100")
    found = until(lambda: [m.finding for m in controller.of(wire.Found) if m.finding.kind == "hang"])
    assert (found[0].rank, found[0].step, found[0].phase) == (1, 99, Phase.BACKWARD)
    assert found[0].stuck_s < 5
    controller.ask(wire.StateRequest(3))
    states = {state.rank: state for state in until(lambda: controller.of(wire.States))[0].states}
    assert states[0].alive
    assert states[1].alive
    assert [op.op for op in states[0].in_flight] == [Op.ALLREDUCE]
    started = {rank: {stream.group: stream.started for stream in states[rank].streams} for rank in (0, 1)}
    group, seq = states[0].in_flight[0].group, states[0].in_flight[0].seq
    assert (started[0][group], started[1][group]) == (seq, seq - 1)
    assert states[0].phase == Phase.BACKWARD
    assert states[0].step == states[1].step + 1

    controller.ask(wire.SaveRings(1))
    saved = tmp_path / "rings" / "rank-00001.ring"
    until(saved.exists)
    assert RingReader(saved).header.rank == 1


@pytest.mark.quiet
def test_an_agent_that_was_killed_is_followed_by_one_that_goes_on(
    start: Callable[..., Job], controller: Controller, tmp_path: Path
) -> None:
    job = start("80", str(tmp_path / "clock"))
    until(lambda: len(job.steps()) >= 20)
    os.kill(job.pids["agent"], signal.SIGKILL)
    job.next_pids()
    until(lambda: len(job.steps()) >= 80)
    assert [line["step"] for line in job.steps()] == list(range(80))
    assert len(controller.of(wire.Hello)) == 2
    assert not controller.of(wire.Found)
    clock = job.clock(0)
    errors = sorted(abs(line["ranks"]["0"]["d"] / clock[line["step"]] - 1) for line in job.steps()[1:])
    assert errors[len(errors) // 2] < 0.005


def test_nothing_outlives_a_killed_launcher(
    start: Callable[..., Job], controller: Controller, tmp_path: Path
) -> None:
    job = start("10000", str(tmp_path / "clock"))
    until(lambda: len(job.steps()) >= 5)
    os.kill(job.pids["launcher"], signal.SIGKILL)
    everyone = [*job.pids["workers"], job.pids["agent"]]
    until(lambda: not any(alive(pid) for pid in everyone), 20.0)
    assert {path.name for path in (tmp_path / "rings").iterdir()} == {"rank-00000.ring", "rank-00001.ring"}
    assert "killed" in (tmp_path / "nodes" / "0" / "agent.log").read_text()
    byes = until(lambda: controller.of(wire.Bye))  # it may still be on its way
    assert [bye.reason for bye in byes] == ["the launcher is gone"]
