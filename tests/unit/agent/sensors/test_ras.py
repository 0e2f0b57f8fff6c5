"""NCCL's RAS is asked once in a hang, in a thread; one that never answers costs nothing but its answer."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.agent.sensors.ras import RasSensor, launched_by
from keepstep.core.errors import TraceError
from keepstep.core.launched import Launched
from keepstep.traces.ras import read_ras

RECORDED = Path(__file__).parents[3] / "recorded" / "h100" / "asleep_before_backward" / "ras.json.txt"


def recorded(*processes: int, hosts: tuple[str, ...] = ("127.0.0.1",) * 2) -> bytes:
    """An answer of an H100's job, with other numbers of processes."""
    text = RECORDED.read_text()
    content: dict[str, Any] = json.loads(text[text.index("{") :])
    for one, process, host in zip(content["communicators"][0]["ranks"], processes, hosts, strict=True):
        one["pid"], one["host"] = process, host
    return json.dumps(content).encode()


@pytest.fixture
def workers(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, list[int]]]:
    """A socket that listens where the environment of two processes says that RAS does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {"NCCL_RAS_ADDR": f"127.0.0.1:{server.getsockname()[1]}"}
        started = [
            subprocess.Popen([sys.executable, "-c", "input()"], env=environment, stdin=subprocess.PIPE)
            for _ in range(2)
        ]
        yield server, [one.pid for one in started]
        for one in started:
            one.communicate(b"\n")


def test_the_counts_of_the_nodes_ranks_are_told_as_long_as_they_stand_still(
    workers: tuple[socket.socket, list[int]],
) -> None:
    server, processes = workers
    asked: list[bytes] = []

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            asked.append(connection.recv(200))
            connection.sendall(recorded(*processes))

    threading.Thread(target=serve, daemon=True).start()
    sensor = RasSensor()
    ranks = {rank: (process, 40 + rank) for rank, process in enumerate(processes)}
    asyncio.run(sensor.launched(100.0, ranks))
    (first,), (second,) = sensor.of(0, 40), sensor.of(1, 41)
    assert (first.size, first.communicator) == (2, second.communicator)
    assert first.counts["AllReduce"] > second.counts["AllReduce"]
    assert sensor.of(0, 41) == ()  # it has called something since
    asyncio.run(sensor.launched(130.0, ranks))
    asyncio.run(sensor.launched(130.0, {**ranks, 0: (processes[0], 50)}))
    assert len(asked) == 1


def test_a_service_that_never_answers_is_not_waited_for(workers: tuple[socket.socket, list[int]]) -> None:
    server, processes = workers
    asked: list[float] = []
    over = threading.Event()

    def hang(host: str, port: int, patience_s: float) -> bytes:
        assert (host, port) == server.getsockname()
        asked.append(patience_s)
        over.wait(60)
        raise TraceError("RAS does not end its answer")

    sensor = RasSensor(hang)
    ranks = {0: (processes[0], 5)}
    for now_s in (100.0, 200.0):
        asyncio.run(sensor.launched(now_s, ranks))
        assert sensor.of(0, 5) == ()
    over.set()
    asyncio.run(sensor.launched(300.0, ranks))  # the same hang
    assert sensor.of(0, 5) == ()
    assert asked == [8.0]


def test_who_is_switched_off_or_has_no_address_is_not_asked() -> None:
    def never(host: str, port: int, patience_s: float) -> bytes:
        raise AssertionError

    for name, value in (("NCCL_RAS_ENABLE", "0"), ("NCCL_RAS_ADDR", "here"), ("NCCL_RAS_ADDR", "here:99999")):
        with subprocess.Popen(
            [sys.executable, "-c", "input()"],
            env={name: value},
            stdin=subprocess.PIPE,
        ) as process:
            sensor = RasSensor(never)
            asyncio.run(sensor.launched(100.0, {0: (process.pid, 1)}))
            assert sensor.of(0, 1) == ()
            process.communicate(b"\n")


def test_nobody_answers_at_the_usual_address_of_a_process_that_is_gone() -> None:
    def refuses(host: str, port: int, patience_s: float) -> bytes:
        raise TraceError("no RAS there")

    sensor = RasSensor(refuses)
    asyncio.run(sensor.launched(100.0, {0: (1 << 22, 1)}))
    assert sensor.of(0, 1) == ()


def test_ranks_are_known_by_processes_and_in_doubt_by_the_jobs_numbers() -> None:
    def told(
        processes: dict[int, int], *pids: int, hosts: tuple[str, ...]
    ) -> dict[int, tuple[Launched, ...]]:
        return launched_by(read_ras(recorded(*pids, hosts=hosts)), processes)

    assert told({0: 70, 1: 71}, 70, 71, hosts=("a", "a")).keys() == {0, 1}
    assert told({1: 70}, 69, 70, hosts=("a", "b")).keys() == {1}
    assert told({0: 7}, 7, 7, hosts=("a", "b")).keys() == {0}  # two containers: rank 0 is on a
    assert told({1: 7}, 7, 7, hosts=("a", "b")).keys() == {1}
    assert told({4: 7}, 7, 7, hosts=("a", "b")) == {}  # of another job
    assert told({0: 70, 1: 99}, 70, 71, hosts=("a", "a")) == {}
    assert told({0: 5}, 70, 71, hosts=("a", "a")) == {}
