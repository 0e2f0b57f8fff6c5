"""A run made by hand, and a real server of it on a free port, in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from keepstep.core.incident import Action, Culprit, Event, Incident, Recovery
from keepstep.core.layout import ParallelLayout
from keepstep.view.run_snapshot import LinkRate, NodeView, RankTable, RunSnapshot
from keepstep.view.samples import SampleStore
from keepstep.view.tiles import row_order
from keepstep.view.web.access import Access
from keepstep.view.web.app import Exposition, Served, make_app
from keepstep.view.web.feed import Feed
from keepstep.view.web.serving import Address, WebServer, bound_socket

SLOW = Incident(
    number=2, kind="slow", onset_step=30, detected_step=32, relief_step=None, job_slowdown=1.8,
    culprits=(Culprit(rank=5, node="gpu-2", stage="backward", slowdown=2.0, confidence="high", cause="compute"),),
    victims=(0, 1, 2), evidence=("rank 5: own time 100 -> 200 ms",), missing=(), iteration_before_s=0.11,
    iteration_after_s=0.21, detected_unix_s=1_700_000_032.0, onset_unix_s=1_700_000_030.0, lost_s=2.0,
    events=(Event("noticed", 1_700_000_031.0, 31),), world_size=8, ranks_reporting=8,
    actions=(Action("S2, fewer micro-batches", begun_unix_s=1_700_000_035.0),),
)  # fmt: skip
CRASH = Incident(
    number=1, kind="crash", onset_step=None, detected_step=10, relief_step=11, job_slowdown=None,
    culprits=(Culprit(rank=3, node="gpu-1", confidence="high", cause="SIGKILL"),), victims=(), evidence=(), missing=(),
    status="relieved", detected_unix_s=1_700_000_010.0, closed_unix_s=1_700_000_011.0,
    recovery=Recovery(1, 3, "was killed", 0.3, (("ended", 0.1), ("first step", 0.2)), 1, 8),
)  # fmt: skip


class MadeRun:
    """A source of snapshots made by hand: eight ranks on two nodes, one of them slow from step 30 on."""

    def __init__(self, steps: int = 40, world: int = 8, **changes: Any) -> None:
        self.samples = SampleStore()
        self.looks = 0
        self._world, self.changes = world, changes
        self.step = -1
        self._own = self._all = np.zeros(world, np.float32)
        for _ in range(steps):
            self.make_step()
        self.samples.arrange(row_order(world, ParallelLayout.declared(f"tp2-pp2-dp{world // 4}")))

    def make_step(self) -> None:
        """One more step of all ranks."""
        self.step += 1
        ranks = np.arange(self._world, dtype=np.int32)
        self._own = np.full(self._world, 0.1, np.float32)
        self._own[min(5, self._world - 1)] *= 2 if self.step >= 30 else 1
        self._all = np.full(self._world, self._own.max() + 0.01, np.float32)
        self.samples.take(ranks, np.full(self._world, self.step, np.int64), self._own, self._all)

    def refresh(self) -> RunSnapshot:
        self.looks += 1
        n = self._world
        zeros = np.zeros(n, np.float32)
        ranks = RankTable(
            np.arange(n, dtype=np.int32), (np.arange(n) // 4).astype(np.int32), np.full(n, self.step, np.int64),
            np.full(n, 2, np.int16), self._all, self._own, zeros, zeros, np.ones(n, bool), np.ones(n, bool),
        )  # fmt: skip
        made = RunSnapshot(
            name="made", unix_s=1_700_000_040.0 + self.step, state="running", state_s=30.0, world_size=n,
            newest_step=self.step, layout=ParallelLayout.declared(f"tp2-pp2-dp{n // 4}"), ranks=ranks,
            nodes=tuple(
                NodeView(at, f"gpu-{at + 1}", sealed_step=self.step, backed_up_step=self.step - 1, stored_step=20)
                for at in range(-(-n // 4))
            ),
            incidents=(CRASH, SLOW), links=(LinkRate(0, 1, 1e8, 9e8), LinkRate(1, 0, 9e8, 9e8)), has_checkpoints=True,
        )  # fmt: skip
        return replace(made, **self.changes)

    @property
    def is_whole(self) -> bool:
        return self.looks > 0

    def read_all(self) -> RunSnapshot:
        return self.refresh()

    def close(self) -> None: ...


class Viewer:
    """Asks a server, one connection a request."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body. An underscore in a header's name stands for a hyphen."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            line.request(method, path, body, sent)
            answer = line.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            line.close()

    def raw(self) -> socket.socket:
        """A connection on which nothing was sent yet."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@contextlib.contextmanager
def serving(
    source: Any = None,
    access: Access | None = None,
    *,
    metrics: Exposition | None = None,
    feed: Callable[[Any], Feed] = Feed,
    tls: ssl.SSLContext | None = None,
    most_connections: int = 64,
    **limits: Any,
) -> Iterator[Viewer]:
    """A server of a run, until the block ends."""
    bound = bound_socket(Address("127.0.0.1", 0), most_connections)
    loop_of: list[tuple[asyncio.AbstractEventLoop, WebServer]] = []

    async def serve() -> None:
        served = Served(feed(source or MadeRun()), access or Access(), metrics=metrics, tls=tls)
        server = WebServer(make_app(served), tls=tls, closing=served.feed.close, **limits)
        loop_of.append((asyncio.get_running_loop(), server))
        with server.quiet():
            await server.serve([bound])

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        viewer = Viewer(bound.getsockname()[1])
        while thread.is_alive() and not (loop_of and loop_of[0][1].started):
            time.sleep(0.005)
        yield viewer
    finally:
        loop_of[0][1].should_exit = True
        thread.join()
