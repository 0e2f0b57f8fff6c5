"""The controller as a process: sockets, files, time and signals around its core without I/O."""

from __future__ import annotations

import asyncio
import contextlib
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
    StoreStanding,
    StoreStop,
    Tell,
    WriteIncident,
)
from keepstep.control.followed import Window
from keepstep.control.following import Viewers
from keepstep.control.incidents.job_words import read_tables_ahead
from keepstep.control.incidents.locators import Locators
from keepstep.control.overview import answer_to_look
from keepstep.control.run_status import status_of
from keepstep.control.settings import Settings
from keepstep.control.status_writer import StatusWriter, write_status
from keepstep.core.errors import RunError
from keepstep.core.incident import Incident
from keepstep.core.log_lines import one_line
from keepstep.core.own_folders import make_folder, unwritten, write_whole
from keepstep.core.steady_time import steady_unix_s
from keepstep.core.within import within
from keepstep.report.incidents import incident_to_json, read_incidents
from keepstep.report.verdict import render, render_action, render_closing
from keepstep.wire.messages import Council, Placement, Standing, Stop

logger = logging.getLogger("keepstep.control")

_TICK_S = 0.1
_FEW_NODES, _RARELY_S = 1024, 5.0  # with more nodes, status.json is written this rarely
_UNANSWERED = tuple(f"[Errno {one}]" for one in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH))
_MOST_UNWRITTEN = 1000
_LAST_WRITE_S = 10.0  # longest wait at the end for a status that is being written
_REACH_S = 5.0  # after so long without an answer an election port is reported as unreachable

_EffectHandler: TypeAlias = Callable[[Any, Any], None]
Placements = tuple[tuple[str, int, Placement], ...]
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


class RunFiles:
    """The controller's part of a run's folder. Each file appears whole; what writes raises OSError when it cannot.

    ``council``: the file of the elected host's council, for a controller that can move to another node.
    """

    def __init__(self, folder: Path, council: Path | None = None) -> None:
        self.folder = folder
        self._council = council
        self._stop = council.with_suffix(".stop.json") if council is not None else folder / "stop.json"
        self._incidents = folder / "incidents"

    def incidents(self) -> list[Incident]:
        """The incidents that earlier controllers of this run wrote. Raises RunError where a file is no incident."""
        return read_incidents(self._incidents)

    def numbers(self) -> int:
        """The highest number of an incident file, readable or not: numbers are never used twice."""
        taken = [int(path.stem) for path in self._incidents.glob("[0-9]*.json") if path.stem.isdigit()]
        return max(taken, default=0)

    def placements(self) -> Placements:
        """The rank table that an earlier controller of this run gave out; empty when there is none."""
        return _read(self.folder / "placement.json", Placements, "is no rank table of keepstep") or ()

    def stop(self) -> Stop | None:
        """What an earlier controller of this run was ending the job with."""
        return _read(self._stop, Stop, "says nothing of how the job ends")

    def write_stop(self, stop: Stop) -> None:
        """Write ``stop.json``; the file of a controller that can move is used in its term alone."""
        write_whole(self._stop, msgspec.json.encode(stop))

    def standing(self) -> Standing | None:
        """The standing orders of an operator that an earlier controller of this run was given."""
        return _read(self.folder / "standing.json", Standing, "holds no orders of an operator")

    def write_standing(self, standing: Standing) -> None:
        """Write ``standing.json``."""
        write_whole(self.folder / "standing.json", msgspec.json.encode(standing))

    def council(self) -> Council | None:
        """The council that elected this host, or that an earlier controller on it proposed last."""
        return _read(self._council, Council, "is no council of keepstep") if self._council else None

    def write_council(self, council: Council) -> None:
        """Write the newest council. Call it before anybody is told of that."""
        if self._council is not None:
            write_whole(self._council, msgspec.json.encode(council))

    def write_incident(self, incident: Incident) -> None:
        """Write ``incidents/NNNN.json`` and ``NNNN.txt``."""
        make_folder(self._incidents)
        name = f"{incident.number:04d}"
        text = render(incident, run=spoken(self.folder), timeline=True) + "\n"
        write_whole(self._incidents / f"{name}.txt", text.encode())
        write_whole(self._incidents / f"{name}.json", incident_to_json(incident))

    def write_placements(self, placements: Placements) -> None:
        write_whole(self.folder / "placement.json", msgspec.json.encode(placements))


class ControlServer:
    """One controller process. ``main`` runs until the job is over, SIGTERM comes, or the parent dies."""

    def __init__(self, options: Options, *, parent: int) -> None:
        self._options = options
        self._parent = parent
        self._files = RunFiles(options.run_dir, options.council)
        self._controller = Controller(
            options.settings,
            locators=Locators(options.layout),
            unix_s=steady_unix_s,
            clock_s=time.time,
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
        self._unwritten: dict[str, Callable[[], None]] = {}  # files that could not be written yet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._status = StatusWriter(self._status_tried)
        window = Window(self._controller, options.layout, self._counters, time.monotonic, time.time)
        self._viewers = Viewers(window.answer, lambda s, call: asyncio.get_running_loop().call_later(s, call))
        self._color = sys.stderr.isatty() and "NO_COLOR" not in os.environ

    async def main(self) -> int:
        """Serve; returns the process's exit code."""
        options = self._options
        self._restore()
        loop = self._loop = asyncio.get_running_loop()
        self._status.start()
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
        read_tables_ahead()
        await self._done.wait()
        self._carry_out(self._controller.end(time.monotonic()))
        self._write_status(time.monotonic())
        await self._server.close()
        if not await asyncio.to_thread(self._status.close, _LAST_WRITE_S):
            logger.error("%s: the last status could not be written in time", options.run_dir)
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
        standing = _tried(files.standing, None, "they are as at the start")
        self._controller.running.standing.restore(standing, time.monotonic())
        register = self._controller.cases.desk.register
        register.newest_number = max(register.newest_number, newest)

    # Events from the wire. An error in the core is logged and counted, and must not end the server.

    def _opened(self, connection: wire.Connection) -> None:
        if connection.role == "viewer":
            self._viewers.opened(connection)
            return
        self._connections[connection.number] = connection
        self._controller.connected(connection.number, connection.role)

    def _closed(self, connection: wire.Connection, reason: str) -> None:
        if connection.role == "viewer":
            self._viewers.closed(connection)
            return
        self._connections.pop(connection.number, None)
        if (reaching := self._reaching.pop(connection.number, None)) is not None:
            reaching.cancel()
        logger.info("%s at %s has gone: %s", connection.role, connection.peer, reason)
        unanswered = reason.startswith(_UNANSWERED)
        self._guarded(
            lambda: self._controller.disconnected(connection.number, time.monotonic(), unanswered=unanswered)
        )

    def _message(self, connection: wire.Connection, message: wire.Message) -> None:
        number, now_s = connection.number, time.monotonic()
        # Who looks changes nothing.
        if connection.role == "viewer":
            self._viewers.message(connection, message)
        elif isinstance(message, wire.Look):
            self._guarded(lambda: [Send((number,), answer_to_look(self._controller, now_s))])
        else:
            self._guarded(lambda: self._controller.message(number, message, now_s))

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

    def _counters(self) -> dict[str, int]:
        assert self._server is not None
        return {**self._server.counters.as_dict(), "errors": self._failures}

    def _write_status(self, now_s: float) -> None:
        status = status_of(self._controller, now_s, time.time(), self._counters())
        folder = self._options.run_dir
        self._status.write(lambda: write_status(folder, *status))

    def _status_tried(self, error: OSError | None) -> None:
        """Called in the writer's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # because whoever waited has given up, and the loop has ended
            self._loop.call_soon_threadsafe(self._status_written, error)

    def _status_written(self, error: OSError | None) -> None:
        """Where the folder can be written, write what could not be before."""
        if error is not None:
            self._cannot_write(error)
            return
        for name, write in list(self._unwritten.items()):
            self._try(name, write)

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
                await within(_REACH_S, answered.wait())
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

    def _keep(self, name: str, write: Callable[[T], None], what: T) -> None:
        """Write a file, or keep what is to be in it until that can be written, as where the disk is full."""
        self._try(name, lambda: write(what))

    def _try(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
            self._unwritten.pop(name, None)
        except OSError as error:
            if name in self._unwritten or len(self._unwritten) < _MOST_UNWRITTEN:
                self._unwritten[name] = write
            self._cannot_write(error)

    def _cannot_write(self, error: OSError) -> None:
        text = unwritten(self._options.run_dir, error.strerror or str(error))
        for line in self._controller.notices.fresh((text,), time.monotonic()):
            logger.error("%s: %s", error.filename, error.strerror)
            self._print(f"keepstep: {one_line(line)}")

    def _say(self, effect: Say) -> None:
        run, now_s = spoken(self._options.run_dir), steady_unix_s(time.monotonic())
        if effect.what == "closes":
            text = render_closing(effect.incident, color=self._color)
        elif effect.what == "acts":
            text = render_action(effect.incident, color=self._color)
        else:
            text = render(effect.incident, color=self._color, run=run, now_unix_s=now_s) + "\n"
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
        WriteIncident: lambda self, effect: self._keep(
            f"incident {effect.incident.number}", self._files.write_incident, effect.incident
        ),
        Say: _say,
        Tell: lambda self, effect: self._print(f"keepstep: {one_line(effect.text)}"),
        StorePlacement: lambda self, effect: self._keep(
            "table", self._files.write_placements, effect.placements
        ),
        StoreStop: lambda self, effect: self._keep("stop", self._files.write_stop, effect.stop),
        StoreStanding: lambda self, effect: self._keep(
            "standing", self._files.write_standing, effect.standing
        ),
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


def _read(path: Path, kind: type[T], otherwise: str) -> T | None:
    """The content of a file; None without one. Raises RunError with ``otherwise`` for another content."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise RunError(f"{path}: {otherwise}: {error}") from error


def spoken(folder: Path) -> str:
    """How an operator names the run: by its name under ./runs, where the verbs look, by its path elsewhere."""
    return folder.name if folder.parent == Path("runs").resolve() else str(folder)
