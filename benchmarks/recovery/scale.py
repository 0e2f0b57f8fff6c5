"""The control plane's part of a recovery at 1,024, 4,096 and 16,384 nodes, and stores with 64 to 1,024 clients.

    python -m benchmarks.recovery.scale [--part NAME] [--nodes N ...] [--clients N ...] [--repetitions N] [--json FILE]

The controller is the shipped program over real, authenticated TCP connections on loopback. The launchers are stand-ins
in one process, which use the other core: they join, and answer the order to end their workers at once, as if they had
none; seven of them elect and keep every rank table, as by default. A recovery is timed from the moment when one of them
tells of a failure until the last has its place in the next incarnation; what devices and workers take to end and to
start is no part of it. Every stand-in checks its place.

The least that one core can do it in is measured beside: bare sockets on loopback that send each node two messages of
the same length and read one, without a controller. Where that alone grows by more than a fifth, no controller of one
process can be flat.

Stores are torch's, see ``stores.py``.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import psutil
from benchmarks._report import Line, Report, bench_arguments
from benchmarks.controller import start_controller
from benchmarks.recovery.stores import QUICK_SIZES, SIZES, stores
from msgspec import structs

from keepstep import wire

GOAL = "≤ 3 s, and flat within 20 % from 1,024 on"
MOST_S = 3.0
FLAT = 1.2
RANKS = 8  # of a node
_CONNECT_AT_ONCE = 200
_PATIENCE_S = 120.0
_MOST_RESTARTS = 50
_AT_ONCE = 4096  # sockets of each end
_MESSAGE_BYTES = 64, 48, 160  # of Halt, Halted and Placement with their frames


class Launchers:
    """All stand-ins: how many have which place."""

    def __init__(self, nodes: int, port: int) -> None:
        self.nodes, self.port = nodes, port  # of all elections
        self.all: list[Launcher] = []
        self.placed: dict[int, set[int]] = {}  # node ranks by incarnation
        self.done = asyncio.Event()
        self.wrong: list[str] = []

    def place(self, placement: wire.Placement) -> None:
        """One has been told its place."""
        places = self.placed.setdefault(placement.incarnation, set())
        if placement.node_rank in places or placement.first_rank != placement.node_rank * RANKS:
            self.wrong.append(f"{placement}")
        places.add(placement.node_rank)
        if len(places) == self.nodes:
            self.done.set()


_ANSWERS: dict[type[Any], Callable[[Any], wire.Message]] = {
    wire.Halt: lambda order: wire.Halted(order.incarnation, 29500 + order.incarnation + 1),
    wire.Council: lambda council: wire.Kept(council.term, council.version),
}


class Launcher(asyncio.Protocol):
    """One connection."""

    def __init__(self, number: int, key: wire.RunKey, launchers: Launchers) -> None:
        self._number, self._key, self._launchers = number, key, launchers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        here, there = (transport.get_extra_info(name) for name in ("sockname", "peername"))
        ends = wire.Ends(f"{here[0]}:{here[1]}", f"{there[0]}:{there[1]}")
        self.channel = wire.ClientChannel(self._key, "launcher", ends)
        self.transport.write(self.channel.open())

    def data_received(self, data: bytes) -> None:
        messages, answer = self.channel.receive(data)
        if answer:
            self.transport.write(answer)
            node, nodes = f"gpu-{self._number:05d}", self._launchers.nodes
            self.send(wire.Hello("launcher", node, -1, 1000 + self._number))
            join = wire.Join(node, "127.0.0.1", RANKS, 29500, self._number, nodes, nodes, _MOST_RESTARTS)
            seat = wire.Seat(self._number + 1, node, 1000 + self._number, "127.0.0.1", self._launchers.port)
            self.send(structs.replace(join, seat=seat))
        for message in messages:
            if (answer := _ANSWERS.get(type(message))) is not None:
                self.send(answer(message))
            elif isinstance(message, wire.Placement):
                self._launchers.place(message)
            elif isinstance(message, wire.Stop | wire.Refused):
                self._launchers.wrong.append(f"{message}")
                self._launchers.done.set()

    def send(self, message: wire.Message) -> None:
        """To the controller."""
        self.transport.write(self.channel.send(message))


def _elect(connection: wire.Connection, message: wire.Message) -> None:
    if isinstance(message, wire.Where):
        connection.send(wire.Leads(1))


async def measure_nodes(nodes: int, repetitions: int, run: Path) -> tuple[list[float], float, float]:
    """Seconds of each recovery; CPU seconds of the controller for one; seconds until all had joined."""
    key = wire.RunKey(wire.write_secret(run / "secret"))
    process, port = start_controller(run, run / "secret", nodes, seat=1)
    watched = psutil.Process(process.pid)
    answers = wire.ServerCallbacks(_elect, lambda _: None, lambda _, __: None)
    elections = await wire.serve("127.0.0.1", 0, key, answers, roles=wire.TO_ELECTOR)
    launchers = Launchers(nodes, elections.port)
    loop = asyncio.get_running_loop()
    try:
        began = time.monotonic()
        for first in range(0, nodes, _CONNECT_AT_ONCE):
            made = await asyncio.gather(
                *(
                    loop.create_connection(lambda n=n: Launcher(n, key, launchers), "127.0.0.1", port)
                    for n in range(first, min(first + _CONNECT_AT_ONCE, nodes))
                )
            )
            launchers.all += [one for _, one in made]
        await asyncio.wait_for(launchers.done.wait(), _PATIENCE_S)
        joined_s = time.monotonic() - began
        took: list[float] = []
        before = sum(watched.cpu_times()[:2])
        for incarnation in range(repetitions):
            launchers.done.clear()
            began = time.monotonic()
            failing = launchers.all[(incarnation * 997) % nodes]
            failing.send(wire.Failed(incarnation, 1, f"stand-in failure {incarnation}"))
            await asyncio.wait_for(launchers.done.wait(), _PATIENCE_S)
            took.append(time.monotonic() - began)
            if launchers.wrong or len(launchers.placed.get(incarnation + 1, ())) != nodes:
                raise RuntimeError(f"the {nodes} places are not right: {launchers.wrong[:3]}")
            await asyncio.sleep(0.5)
        cpu_s = (sum(watched.cpu_times()[:2]) - before) / repetitions
        return took, cpu_s, joined_s
    finally:
        for one in launchers.all:
            one.transport.abort()
        await elections.close()
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def bare_s(nodes: int) -> float:
    """Seconds that one core's kernel needs for a recovery's messages to and from so many nodes; no more than that."""
    return sum(_exchange_s(min(_AT_ONCE, nodes - first)) for first in range(0, nodes, _AT_ONCE))


def _exchange_s(nodes: int) -> float:
    order, answer, place = (bytes(size) for size in _MESSAGE_BYTES)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server, ExitStack() as sockets:
        ends: list[tuple[socket.socket, socket.socket]] = []
        for _ in range(nodes):
            there = sockets.enter_context(socket.create_connection(server.getsockname()))
            ends.append((sockets.enter_context(server.accept()[0]), there))
        began_s = time.monotonic()
        for here, _ in ends:
            here.send(order)
        took_s = time.monotonic() - began_s
        for _, there in ends:
            there.recv(len(order))
            there.send(answer)
        began_s = time.monotonic()
        for here, _ in ends:
            here.recv(len(answer))
        for here, _ in ends:
            here.send(place)
        return took_s + time.monotonic() - began_s


def control_plane(sizes: Iterable[int], repetitions: int, report: Report) -> None:
    """One line for each size."""
    least: float | None = None
    for nodes in sizes:
        with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as folder:
            os.chmod(folder, 0o700)
            took, cpu_s, joined_s = wire.run(measure_nodes(nodes, repetitions, Path(folder)))
        median_s = statistics.median(took)
        least_s = min(bare_s(nodes) for _ in range(3))
        least = median_s if least is None else least
        report.add(
            Line(
                f"from a failure to the last place, {nodes:,} nodes, {nodes * RANKS:,} ranks,"
                f" median of {len(took)} ({min(took):.3f} to {max(took):.3f} s)",
                round(median_s, 3),
                "s",
                goal=GOAL,
                met=median_s <= MOST_S and median_s <= FLAT * least,
                limit=f"stand-in launchers on loopback without workers; {cpu_s:.2f} s of CPU in the controller;"
                f" all had joined after {joined_s:.1f} s; bare sockets take {least_s:.3f} s of one core",
            )
        )


def main() -> int:
    """Measure, print, write."""
    parser = bench_arguments("recovery.scale", __doc__ or "")
    parser.add_argument("--nodes", type=int, action="append", help="default: 1024, 4096 and 16384")
    parser.add_argument("--clients", type=int, action="append", help="default: 64, 256 and 1024")
    parser.add_argument("--part", choices=("control-plane", "stores"), help="only this one")
    parser.add_argument(
        "--repetitions", type=int, default=10, metavar="N", help="recoveries of each size (10)"
    )
    given = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report = Report("recovery_scale", quick=given.quick, packages=("keepstep", "msgspec", "uvloop", "torch"))
    if given.part != "stores":
        sizes = given.nodes or ([1_024] if given.quick else [1_024, 4_096, 16_384])
        control_plane(sizes, 1 if given.quick else given.repetitions, report)
    if given.part != "control-plane":
        stores(given.clients or (QUICK_SIZES if given.quick else SIZES), report)
    report.finish(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
