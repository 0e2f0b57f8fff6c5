"""What of the groups' set-up grows with the ranks: connections, lookups of names, the exchange of Gloo's addresses.

Stores and their clients are torch's. Ranks are threads of a few forked processes, so that 1,024 fit one machine.
What Gloo asks of the store is asked here by hand, as it was seen to do for one group of all ranks: by default it waits
for each peer's value and gets it; with the switches that keepstep sets it gets 128 short values at once.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from benchmarks._report import Line, Report

SIZES = (64, 256, 1_024)
QUICK_SIZES = (64, 256)
LOOKUP_S = 0.001
_PROCESSES, _THREADS = 4, 16
_BATCH = 128
_ADDRESS_BYTES = 154  # what a rank tells of itself in 2.13, and
_PAIR_BYTES = 8  # for each other rank, unless its number is told by its rank
_RESOLVER = "127.0.0.53"
_PATIENCE_S = 3600.0
_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


@dataclass(frozen=True, slots=True)
class Way:
    """How the ranks meet."""

    clients: int
    processes: int = _PROCESSES
    threads: int = _THREADS
    stores: int = 1
    libuv: bool = True
    looks_up: bool = False  # names of those that connect, as torch does by itself
    resolver: bool = False  # names are asked of ours, which knows nobody and answers after LOOKUP_S
    exchange: str = ""  # "one by one" or "in batches"


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds until the last rank was through, and of the stores' CPU."""

    connect_s: float
    exchange_s: float
    store_cpu_s: float


def measure(way: Way) -> Took:
    """All clients connect and set a key; then, if the way says so, they exchange addresses."""
    import torch.distributed  # noqa: F401  # once for all that are forked; this process makes no store

    context = multiprocessing.get_context("fork")
    ended: list[Any] = []

    def start(target: Callable[..., None], *arguments: Any) -> Any:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, way, *arguments), daemon=True)
        process.start()
        ended.append(process)
        return ours

    with _resolver(way.resolver) as resolver:
        try:
            servers = [start(_serve, resolver) for _ in range(way.stores)]
            ports = [_hear(server) for server in servers]
            each = way.clients // way.processes
            clients = [
                start(_take_part, resolver, ports[n % way.stores], range(n * each, (n + 1) * each))
                for n in range(way.processes)
            ]
            steps = [_all_at_once(clients) for _ in range(3 if way.exchange else 1)]
            cpu_s = 0.0
            for server in servers:
                server.send(None)
                cpu_s += _hear(server)
            return Took(steps[0], sum(steps[1:]), cpu_s)
        finally:
            for process in ended:
                process.kill()
                process.join()


def _all_at_once(clients: list[Any]) -> float:
    for client in clients:
        client.send(None)
    times = [_hear(client) for client in clients]
    return max(end for _, end in times) - min(began for began, _ in times)


def _hear(connection: Any) -> Any:
    if not connection.poll(_PATIENCE_S):
        raise RuntimeError(f"no answer within {_PATIENCE_S:g} s")
    return connection.recv()


def _prepare(way: Way, resolver: str) -> None:
    if resolver:
        _ask(resolver)
    if not way.looks_up:
        from keepstep.worker import _numeric_peers  # pyright: ignore[reportMissingModuleSource]

        _numeric_peers.install()


def _serve(told: Any, way: Way, resolver: str) -> None:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    _prepare(way, resolver)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=way.libuv)
    before_s = time.process_time()
    told.send(store.port)
    told.recv()
    told.send(time.process_time() - before_s)


def _take_part(told: Any, way: Way, resolver: str, port: int, ranks: range) -> None:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    _prepare(way, resolver)
    stores: dict[int, TCPStore] = {}
    peers = [str(peer) for peer in range(way.clients)]
    one_by_one = way.exchange == "one by one"
    value = "x" * (_ADDRESS_BYTES + (_PAIR_BYTES * way.clients if one_by_one else 0))

    def connect(rank: int) -> None:
        stores[rank] = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        stores[rank].set(f"rank{rank}", "here")

    def publish(rank: int) -> None:
        stores[rank].set(str(rank), value)

    def read(rank: int) -> None:
        if one_by_one:
            for peer in peers:
                stores[rank].wait([peer])
                stores[rank].get(peer)
        else:
            for first in range(0, len(peers), _BATCH):
                stores[rank].multi_get(peers[first : first + _BATCH])

    for step in (connect, publish, read):
        told.recv()
        began_s = time.monotonic()
        with ThreadPoolExecutor(way.threads) as pool:
            list(pool.map(step, ranks))
        told.send((began_s, time.monotonic()))
    told.recv()


@contextmanager
def _resolver(wanted: bool) -> Iterator[str]:
    """A name server of our own; gives the resolv.conf that names it."""
    if not wanted:
        yield ""
        return
    context = multiprocessing.get_context("fork")
    listens = context.Event()
    process = context.Process(target=_answer_all, args=(listens,), daemon=True)
    process.start()
    try:
        listens.wait(_PATIENCE_S)
        with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
            file.write(f"nameserver {_RESOLVER}\n")
            file.flush()
            yield file.name
    finally:
        process.kill()
        process.join()


class _Nobody(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        answer = data[:2] + b"\x81\x83" + data[4:6] + bytes(6) + data[12:]
        asyncio.get_running_loop().call_later(LOOKUP_S, self._transport.sendto, answer, addr)


def _answer_all(listens: Any) -> None:
    async def serve() -> None:
        await asyncio.get_running_loop().create_datagram_endpoint(_Nobody, local_addr=(_RESOLVER, 53))
        listens.set()
        await asyncio.Event().wait()

    asyncio.run(serve())


def _ask(resolver: str) -> None:
    """Names are asked of it from now on, in this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    private, bind = _MS_REC | _MS_PRIVATE, _MS_BIND
    done = libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, private, None)
    if done or libc.mount(resolver.encode(), b"/etc/resolv.conf", None, bind, None):
        raise OSError(ctypes.get_errno(), "a resolver of our own needs a mount namespace")


def stores(sizes: Iterable[int], report: Report) -> None:
    """FlashRecovery's figure 10, on one machine, and what else grows."""
    for clients in sizes:
        plain = Way(clients)
        ways = {
            "one after the other (figure 10's serial)": replace(plain, processes=1, threads=1),
            "together": plain,
            "together, four stores": replace(plain, stores=_PROCESSES),
            "together, torch's old server": replace(plain, libuv=False),
        }
        slow = f"a name server that answers in {1000 * LOOKUP_S:g} ms"
        named = {
            f"together, {slow}, torch alone": replace(plain, resolver=True, looks_up=True),
            f"together, {slow}": replace(plain, resolver=True),
        }
        if os.geteuid() == 0:
            ways.update(named)
        else:
            for way in named:
                report.leave_out(
                    f"{clients:,} store clients, {way}", "needs a mount namespace: run it as root"
                )
        for text, way in ways.items():
            took = measure(way)
            _line(
                report, f"{clients:,} store clients connect and set a key, {text}", took.connect_s, way, took
            )
        for text, how in (("torch alone", "one by one"), ("with keepstep's switches", "in batches")):
            way = replace(plain, exchange=how)
            took = measure(way)
            name = f"{clients:,} ranks exchange the addresses of one Gloo group, {text}"
            _line(report, name, took.exchange_s, way, took)


def _line(report: Report, name: str, took_s: float, way: Way, took: Took) -> None:
    limit = f"{way.processes} processes of {way.threads} threads; loopback, {os.cpu_count()} cores for all"
    cpu = f"; {took.store_cpu_s:.3f} s of the stores' CPU"
    report.add(Line(name, round(took_s, 3), "s", limit=limit + cpu))
