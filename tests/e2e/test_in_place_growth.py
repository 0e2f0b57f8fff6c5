"""Many recoveries in the same two processes: none of what they hold grows."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.alone import alone
from tests.unit.launch.local_runs import ToldRun

from keepstep.checkpoint.memory.cache import Cache
from keepstep.checkpoint.memory.cache_server import ADDRESS, CacheServer
from keepstep.launch.command.addresses import free_port
from keepstep.launch.command.job import job_from_command_line
from keepstep.launch.workers.survivors import Survivors

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

JOB = Path(__file__).with_name("in_place_repeat.py")
RANKS = 2
WARM_UP = 10
LONG = 200
MODEL_KIB = 1056  # with gradients and optimizer: less than one of a hundred that were let go
PATIENCE_S = 300.0


def environment(rank: int, incarnation: int, port: int, **more: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "KEEPSTEP_INCARNATION": str(incarnation),
        "KEEPSTEP_MILESTONES": os.devnull,
        "OMP_NUM_THREADS": "1",
        **more,
    }


async def until(condition: Callable[[], Any]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


async def recoveries(folder: Path, kind: str, count: int) -> None:
    """Have two workers leave and begin again ``count`` times."""
    run = ToldRun(folder, job_from_command_line(["train.py"], {"KEEPSTEP_LEAVE_S": str(PATIENCE_S)}))
    processes, said = run.processes, run.said
    survivors = Survivors(run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, processes.reap)
    cache = Cache(1 << 30)
    server = CacheServer(cache)
    more = {ADDRESS: server.address, **survivors.environment}
    command = (sys.executable, "-u", str(JOB), str(folder), kind)
    port = free_port("127.0.0.1")
    children = {
        rank: processes.start(
            f"rank {rank}",
            command,
            {**os.environ, **environment(rank, 0, port, **more)},
            on_exit=lambda child: said.append(f"{child.name} ended with {child.status}"),
        )
        for rank in range(RANKS)
    }
    try:
        for incarnation in range(1, count + 1):
            files = [folder / f"{rank}-{incarnation - 1}" for rank in range(RANKS)]
            await until(lambda files=files: said or all(file.exists() for file in files))
            begun_s = time.monotonic()
            survivors.call(children)
            assert await survivors.left() == [], said
            left_s = time.monotonic()
            port = free_port("127.0.0.1")
            for rank in range(RANKS):
                whole = {**os.environ, **environment(rank, incarnation, port, **more)}
                assert survivors.take(rank, whole, (1, 2)) is children[rank]
            (folder / f"left-{incarnation}").write_text(json.dumps([begun_s, left_s]))
        await until(lambda: said or all((folder / f"{rank}-{count}").exists() for rank in range(RANKS)))
        assert said == []
    finally:
        for child in children.values():
            os.kill(child.pid, signal.SIGKILL)
        survivors.end()
        await until(lambda: not any(child.alive for child in children.values()))
        server.close()
        cache.close()


@pytest.mark.parametrize("kind", ["ddp"])
@pytest.mark.parametrize("count", [WARM_UP + 5, pytest.param(LONG, marks=pytest.mark.soak)])
def test_nothing_grows(tmp_path: Path, kind: str, count: int) -> None:
    alone(lambda: recoveries(tmp_path, kind, count))
    for rank in range(RANKS):
        held = [json.loads((tmp_path / f"{rank}-{i}").read_text()) for i in range(count + 1)]
        for what in ("descriptors", "threads"):
            counts = [one[what] for one in held[WARM_UP:]]
            assert max(counts) <= max(counts[:3]), (what, counts)
        if (
            count >= LONG
        ):  # the first hundred fill what torch keeps of the last calls (flight recorder: 2,000)
            grown = held[count]["kibibytes"] - held[count // 2]["kibibytes"]
            assert grown <= MODEL_KIB, grown
