"""The controller as a process: sockets, files, time and signals around its core without I/O."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import msgspec

from keepstep import wire
from keepstep.control.controller import Controller
from keepstep.control.effects import (
    Disconnect,
    Effect,
    Exit,
    Reach,
    Say,
    Send,
    StoreCouncil,
    StorePlacement,
    StoreStop,
    Tell,
    WriteIncident,
)
from keepstep.control.files import RunFiles, spoken
from keepstep.control.incidents.locators import Locators
from keepstep.control.run_status import status_of
from keepstep.control.settings import Settings
from keepstep.core.errors import RunError
from keepstep.core.log_lines import one_line
from keepstep.report.verdict import render, render_action, render_closing

logger = logging.getLogger("keepstep.control")

_TICK_S = 0.1
_FEW_NODES, _RARELY_S = 1024, 5.0  # with more nodes, status.json is written this rarely
_UNANSWERED = tuple(f"[Errno {one}]" for one in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH))
_REACH_S = 5.0  # after so long without an answer an election port is reported as unreachable

_EffectHandler: TypeAlias = Callable[[Any, Any], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line of a controller says."""

    run_dir: Path
    host: str
    port: int
    secret_file: Path
    settings: Settings
    run_id: str = wire.UNNAMED
    council: Path | None = None
    layout: str = ""
    tls: wire.TlsPaths | None = None
    check_addresses: bool = True
    watch_parent: bool = True


class ControlServer:
    """One controller process. ``main`` runs until the job is over, SIGTERM comes, or the parent dies."""

    def __init__(self, options: Options, *, parent: int) -> None:
        self._options = options
        self._parent = parent
        self._files = RunFiles(options.run_dir, options.council)
        self._wall_offset_s = time.time() - time.monotonic()
        self._controller = Controller(
            options.settings,
            locators=Locators(options.layout),
            unix_s=self._unix_s,
            pid=os.getpid(),
        )
        self._server: wire.Server | None = None
        self._connections: dict[int, wire.Connection] = {}
        self._reaching: dict[int, asyncio.Task[None]] = {}
        self._key = wire.RunKey(b"")
        self._tls: ssl.SSLContext | None = None  # for connections that this process opens
        self._done = asyncio.Event()
        self._next_status_s = 0.0
        self._failures = 0
        self._color = sys.stderr.isatty() and "NO_COLOR" not in os.environ

    async def main(self) -> int:
        """Serve; returns the process's exit code."""
        options = self._options
        self._restore()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._done.set)
        tls = wire.server_context(options.tls) if options.tls is not None else None
        self._tls = wire.client_context(options.tls) if options.tls is not None else None
        self._key = wire.RunKey(wire.read_secret(options.secret_file), options.run_id)
        self._server = await self._listen(tls)
        if options.settings.term > 1:  # the first leader listens where the nodes were told to meet
            self._controller.councils.port = self._server.port
        print(msgspec.json.encode({"ready": True, "port": self._server.port}).decode(), flush=True)
        loop.call_later(_TICK_S, self._tick)
        await self._done.wait()
        self._carry_out(self._controller.end(time.monotonic()))
        self._write_status(time.monotonic())
        await self._server.close()
        return 0

    async def _listen(self, tls: ssl.SSLContext | None) -> wire.Server:
        options = self._options
        callbacks = wire.ServerCallbacks(message=self._message, opened=self._opened, closed=self._closed)
        try:
            return await wire.serve(
                options.host,
                options.port,
                self._key,
                callbacks,
                tls=tls,
                check_addresses=options.check_addresses,
            )
        except OSError as error:
            raise RunError(
                f"the controller cannot listen on {options.host}:{options.port}: {error.strerror or error}; "
                f"give another address with --rdzv-endpoint, or end what uses it"
            ) from error

    def _restore(self) -> None:
        files = self._files
        incidents = _tried(files.incidents, [], "numbers go on after it")
        newest = files.numbers()
        placements = _tried(files.placements, (), "the launchers join anew")
        stop = _tried(files.stop, None, "it goes on")
        self._controller.restore(incidents, placements, stop, files.council())
        register = self._controller.cases.desk.register
        register.newest_number = max(register.newest_number, newest)

    # Events from the wire. An error in the core is logged and counted, and must not end the server.

    def _opened(self, connection: wire.Connection) -> None:
        self._connections[connection.number] = connection
        self._controller.connected(connection.number, connection.role)

    def _closed(self, connection: wire.Connection, reason: str) -> None:
        self._connections.pop(connection.number, None)
        if (reaching := self._reaching.pop(connection.number, None)) is not None:
            reaching.cancel()
        logger.info("%s at %s has gone: %s", connection.role, connection.peer, reason)
        unanswered = reason.startswith(_UNANSWERED)
        self._guarded(
            lambda: self._controller.disconnected(connection.number, time.monotonic(), unanswered=unanswered)
        )

    def _message(self, connection: wire.Connection, message: wire.Message) -> None:
        self._guarded(lambda: self._controller.message(connection.number, message, time.monotonic()))

    def _guarded(self, call: Callable[[], list[Effect]]) -> None:
        try:
            self._carry_out(call())
        except Exception:
            self._failures += 1
            if self._failures <= 100:
                logger.exception("an error of keepstep itself; going on")

    def _tick(self) -> None:
        if self._done.is_set():
            return
        if self._options.watch_parent and os.getppid() != self._parent:
            logger.info("the launcher (process %d) is gone", self._parent)
            self._done.set()
            return
        now_s = time.monotonic()
        self._guarded(lambda: self._controller.tick(now_s))
        if now_s >= self._next_status_s:
            few = len(self._controller.cluster.nodes) <= _FEW_NODES
            self._next_status_s = now_s + (1.0 if few else _RARELY_S)
            self._write_status(now_s)
        asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _write_status(self, now_s: float) -> None:
        assert self._server is not None
        counters = {**self._server.counters.as_dict(), "errors": self._failures}
        try:
            self._files.write_status(status_of(self._controller, now_s, self._unix_s(now_s), counters))
        except OSError as error:
            logger.warning("status.json cannot be written: %s", error)

    def _unix_s(self, now_s: float) -> float:
        return now_s + self._wall_offset_s

    # Effects of the core.

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._EFFECTS[type(effect)](self, effect)

    def _begin_to_reach(self, effect: Reach) -> None:
        self._reaching[effect.peer] = asyncio.get_running_loop().create_task(self._reach(effect))

    def _disconnect(self, effect: Disconnect) -> None:
        connection = self._connections.get(effect.peer)
        if connection is not None:
            connection.close(effect.reason)

    def _exit(self, effect: Exit) -> None:
        logger.info("the job is over (%d): %s", effect.exit_code, effect.reason)
        self._done.set()

    async def _reach(self, effect: Reach) -> None:
        seat, answered = effect.seat, asyncio.Event()
        client = wire.Client(
            (seat.address, seat.port),
            self._key,
            role="elector",
            greet=lambda: (wire.Where(),),
            message=lambda _: answered.set(),
            tls=self._tls,
        )
        try:
            try:
                await asyncio.wait_for(answered.wait(), _REACH_S)
            except asyncio.TimeoutError:
                where = one_line(f"{seat.node} does not answer at {seat.address}, port {seat.port}")
                self._print(f"keepstep: {where}: it cannot vote in a controller election until it does")
                await answered.wait()
            self._guarded(lambda: self._controller.reached(effect.peer))
        finally:
            self._reaching.pop(effect.peer, None)
            await client.close()

    def _send(self, effect: Send) -> None:
        body = wire.encode(effect.message)
        for peer in effect.peers:
            connection = self._connections.get(peer)
            if connection is not None:
                connection.send_encoded(body)

    def _keep(self, write: Callable[[T], None], what: T) -> None:
        try:
            write(what)
        except OSError as error:
            logger.error("%s: cannot be written: %s", error.filename, error.strerror)

    def _say(self, effect: Say) -> None:
        run = spoken(self._options.run_dir)
        if effect.what == "closes":
            text = render_closing(effect.incident, color=self._color)
        elif effect.what == "acts":
            text = render_action(effect.incident, color=self._color)
        else:
            text = render(effect.incident, color=self._color, run=run, now_unix_s=time.time()) + "\n"
        if effect.what == "sharper":
            text = f"incident {effect.incident.number:04d}, at a closer look:\n{text}"
        self._print(text)

    @staticmethod
    def _print(text: str) -> None:
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError:
            return  # nobody reads stderr any more; incidents are in the run's folder

    _EFFECTS: ClassVar[Mapping[type, _EffectHandler]] = {
        Send: _send,
        WriteIncident: lambda self, effect: self._keep(self._files.write_incident, effect.incident),
        Say: _say,
        Tell: lambda self, effect: self._print(f"keepstep: {one_line(effect.text)}"),
        StorePlacement: lambda self, effect: self._keep(self._files.write_placements, effect.placements),
        StoreStop: lambda self, effect: self._keep(self._files.write_stop, effect.stop),
        # A failure to write is raised: launchers must not be told of a council that was not kept.
        StoreCouncil: lambda self, effect: self._files.write_council(effect.council),
        Reach: _begin_to_reach,
        Disconnect: _disconnect,
        Exit: _exit,
    }


def _tried(read: Callable[[], T], otherwise: T, then: str) -> T:
    """What ``read`` returns; if its file cannot be used, a warning that ends with ``then``, and ``otherwise``."""
    try:
        return read()
    except RunError as error:
        logger.warning("%s; %s", error, then)
        return otherwise
