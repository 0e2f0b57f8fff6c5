"""``keepstep check`` on several nodes: each checks itself and takes part in the tests of pairs; one hosts them all."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from keepstep import wire
from keepstep.core.descriptors import lack, raise_limit
from keepstep.core.errors import RunError, UsageError, WireError
from keepstep.core.home import home_folder
from keepstep.core.log_lines import one_line
from keepstep.core.node_row import NodeRow
from keepstep.core.process_mark import machine_mark
from keepstep.core.tls_paths import TlsPaths
from keepstep.core.within import within
from keepstep.launch.check.burning import patience_s
from keepstep.launch.check.check_host import CheckHost, Conclusion
from keepstep.launch.check.row_of_node import PATHS_S, Request, row_of_node
from keepstep.launch.command import addresses
from keepstep.launch.command.meeting import Endpoint, Rendezvous, rendezvous_from
from keepstep.launch.command.run_folder import ensure_secret
from keepstep.validate.link_tests import MESSAGE_BYTES, Receiver, send
from keepstep.wire.checking import Arrived, Concluded, PairsTested, PairTests, Reported

_MARGIN_S = 30.0  # A node has so long to report, beyond its burn-in and its paths.
_AGAIN_S = 0.5  # between two looks for the secret
_CONCLUDED_S = 600.0  # Very many nodes have so long beyond all that.
_TRIES = 8  # to reach a host that has been met; they take a quarter of a minute
_MOST_TEXT = 200


@dataclass(frozen=True, slots=True)
class Meeting:
    """How the nodes of a check meet."""

    nodes: int
    rendezvous: Rendezvous
    check_id: str
    secret: Path
    tls: TlsPaths | None

    @property
    def endpoint(self) -> Endpoint:
        """Where."""
        assert self.rendezvous.endpoint is not None
        return self.rendezvous.endpoint


def meeting_from(given: argparse.Namespace, value: Mapping[str, Any], environ: Mapping[str, str]) -> Meeting:
    """How the nodes meet, from the flags and settings. Raises UsageError where something is missing or wrong."""
    if not given.rdzv_endpoint:
        raise UsageError(
            f"check: --nnodes {given.nnodes}: say where the nodes meet, --rdzv-endpoint HOST:PORT"
        )
    flags = {"rdzv_backend": "c10d", "node_rank": -1, "max_restarts": 0, **vars(given)}
    rendezvous = rendezvous_from(argparse.Namespace(**flags), given.nnodes, value["join_timeout_s"])
    home = home_folder(environ)
    if not value["secret_file"] and home is None:
        raise UsageError("check: HOME is not set; name a file that all nodes have with --secret-file")
    where = Path(value["secret_file"]).absolute() if value["secret_file"] else None
    files = [str(value[name]) or None for name in ("tls_cert", "tls_key", "tls_ca")]
    return Meeting(
        given.nnodes,
        rendezvous,
        given.rdzv_id,
        where or (home or Path("/")) / ".config" / "keepstep" / "secret",
        TlsPaths.of(*files),
    )


def check_nodes(
    meeting: Meeting, request: Request, environ: Mapping[str, str], show: Callable[[Conclusion], None]
) -> int:
    """Check this node with all others; returns the exit code. ``show``: called where the check is hosted.

    Raises RunError where the nodes cannot meet.
    """
    logging.getLogger("keepstep.wire").addHandler(logging.NullHandler())  # the error raised says it
    raise_limit()
    try:
        if addresses.becomes_host(meeting.rendezvous):
            return wire.run(_host(meeting, request, environ, show))
    finally:
        addresses.let_go()
    host = addresses.resolve(meeting.endpoint.host)[0]
    unfit = wire.run(_take_part(meeting, Endpoint(host, meeting.endpoint.port), request, environ))
    for line in unfit:
        print(f"keepstep: unfit: {one_line(line)}", file=sys.stderr)
    return 1 if unfit else 0


async def _host(
    meeting: Meeting, request: Request, environ: Mapping[str, str], show: Callable[[Conclusion], None]
) -> int:
    """Host the check, and take part in it like the others."""
    if trouble := lack(meeting.nodes, sys.maxsize):
        raise RunError(trouble)
    ensure_secret(meeting.secret)
    where = Endpoint(addresses.listen_address(meeting.endpoint), meeting.endpoint.port)
    key = wire.RunKey(wire.read_secret(meeting.secret), meeting.check_id)
    host = CheckHost(meeting.nodes)
    tls = wire.server_context(meeting.tls) if meeting.tls else None
    try:
        server = await wire.serve(where.host, where.port, key, host.callbacks, tls=tls, roles=wire.TO_CHECK)
    except OSError as error:
        raise RunError(
            f"the nodes cannot meet at {where}: {error.strerror}; give another --rdzv-endpoint"
        ) from None
    part = asyncio.ensure_future(_take_part(meeting, where, request, environ))
    concluding = asyncio.ensure_future(host.conclude(meeting.rendezvous.join_timeout_s, _rows_s(request)))
    try:
        await asyncio.wait({part, concluding}, return_when=asyncio.FIRST_COMPLETED)
        if not concluding.done() and part.exception() is not None:
            part.result()  # this node cannot take part, and so there is no check
        conclusion = await concluding
    finally:
        for task in (part, concluding):
            task.cancel()
        await asyncio.gather(part, concluding, return_exceptions=True)
        await server.close()
    show(conclusion)
    return 1 if conclusion.unfit else 0


def _rows_s(request: Request) -> float:
    """How long a node may take to check itself."""
    return (patience_s(request.burn_in_s) if request.burn_in_s else 0.0) + PATHS_S + _MARGIN_S


async def _take_part(
    meeting: Meeting, at: Endpoint, request: Request, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """Check this node, be tested with others, and return what is unfit. Raises RunError where that cannot be done."""
    own = addresses.own_address(meeting.rendezvous.local_addr, at.host)
    request = replace(request, address=own)
    try:
        receiver = Receiver(own)
    except OSError as error:
        advice = "correct --local-addr"
        raise RunError(f"test data cannot be taken at {own}: {error.strerror}; {advice}") from None
    arrived = Arrived(request.node, os.getpid(), meeting.nodes, machine_mark(), receiver.endpoint)
    join_s = meeting.rendezvous.join_timeout_s
    part = _Part(receiver, at, arrived)
    try:
        key = wire.RunKey(await _secret(meeting.secret, join_s), meeting.check_id)
        part.connect(key, wire.client_context(meeting.tls) if meeting.tls else None)
        # No thread of an executor, as the interpreter waits for those at its end.
        threading.Thread(target=part.check, args=(request, environ), daemon=True).start()
        if not await part.is_met(join_s):
            raise RunError(part.advice(join_s))
        patience_s = join_s + _rows_s(request) + _CONCLUDED_S
        try:
            return await within(patience_s, part.outcome)
        except asyncio.TimeoutError:
            raise RunError(part.advice(patience_s)) from None
    finally:
        await part.close()
        receiver.close()


class _Part:
    """This node's part in a check, as the host orders it."""

    def __init__(self, receiver: Receiver, at: Endpoint, arrived: Arrived) -> None:
        self._receiver, self._at = receiver, at
        self._loop = asyncio.get_running_loop()
        self._told: list[wire.Message] = [arrived]  # what each new connection begins with
        self._client: wire.Client | None = None
        self._met = asyncio.Event()
        self._trouble = "no answer"
        self._testing: set[asyncio.Future[None]] = set()
        self.outcome: asyncio.Future[tuple[str, ...]] = self._loop.create_future()
        """What is unfit; or the RunError for which there is no outcome."""

    def connect(self, key: wire.RunKey, tls: ssl.SSLContext | None) -> None:
        """Begin to connect to the host."""
        self._client = wire.Client(
            (self._at.host, self._at.port),
            key,
            role="checker",
            greet=lambda: list(self._told),
            message=self._received,
            connected=self._met.set,
            trouble=self._troubled,
            tls=tls,
        )

    async def is_met(self, patience_s: float) -> bool:
        """Wait for the host; False where it takes longer."""
        meeting = asyncio.ensure_future(self._met.wait())
        await asyncio.wait({meeting, self.outcome}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        meeting.cancel()
        return self._met.is_set() or self.outcome.done()

    def check(self, request: Request, environ: Mapping[str, str]) -> None:
        """Check this node, in the calling thread, and tell the host its row."""
        with suppress(RuntimeError):  # the loop has ended, and with it the check
            try:
                row = row_of_node(request, environ, time.monotonic())
            except Exception as error:
                text = f"this node's check failed: {type(error).__name__}: {error}"
                self._loop.call_soon_threadsafe(self._fail, text)
            else:
                self._loop.call_soon_threadsafe(self._report, row)

    def _report(self, row: NodeRow) -> None:
        self._told.append(Reported(row))
        if self._client is not None and self._client.connected:
            self._client.send(self._told[-1])

    def advice(self, waited_s: float) -> str:
        """What to say where there was no outcome for so long."""
        return (
            f"no check at {self._at} after {waited_s:.0f} s: {self._trouble}; start it on all nodes with the same "
            "--rdzv-endpoint, --nnodes and secret"
        )

    async def close(self) -> None:
        """End the connection."""
        self.outcome.cancel()
        if self._client is not None:
            await self._client.close()

    def _received(self, message: wire.Message) -> None:
        self._HANDLERS[type(message)](self, message)

    def _test(self, order: PairTests) -> None:
        async def test() -> None:
            found = await self._loop.run_in_executor(None, transfer, self._receiver, order)
            if self._client is not None:
                self._client.send(found)

        task = asyncio.ensure_future(test())
        self._testing.add(task)
        task.add_done_callback(self._testing.discard)

    def _concluded(self, told: Concluded) -> None:
        if not self.outcome.done():
            self.outcome.set_result(told.unfit)

    def _refused(self, told: wire.Refused) -> None:
        self._fail(f"the host of the check at {self._at}: {told.reason}")

    def _troubled(self, error: Exception, attempt: int) -> None:
        self._trouble = str(error)
        if isinstance(error, wire.AnotherJob):
            self._fail(
                f"{self._at} is that of {wire.job_named(error.theirs)}; give another --rdzv-endpoint or --rdzv-id"
            )
        elif self._met.is_set() and attempt >= _TRIES:
            self._fail(f"the node that hosts the check at {self._at} has gone: {error}")

    def _fail(self, text: str) -> None:
        if not self.outcome.done():
            self.outcome.set_exception(RunError(text))

    _HANDLERS: ClassVar[Mapping[type, Callable[[Any, Any], None]]] = {
        PairTests: _test,
        Concluded: _concluded,
        wire.Refused: _refused,
    }


def transfer(receiver: Receiver, order: PairTests) -> PairsTested:
    """Make the transfers of one round, each within its part of the time."""
    links: list[Any] = []
    missing: list[str] = []
    tests = order.tests
    wanted = sorted(tests.transfers, key=lambda one: one.number)[:4]
    begun_s, limit_s = time.monotonic(), min(max(tests.limit_s, 0.0), 60.0)
    for number, one in enumerate(wanted, 1):
        deadline_s = begun_s + limit_s * number / len(wanted)
        try:
            if one.target == tests.rank:
                links += receiver.receive(one, MESSAGE_BYTES, deadline_s)
            elif one.source == tests.rank:
                send(one, tests.endpoints[one.target], MESSAGE_BYTES, deadline_s)
        except (OSError, ValueError, KeyError) as error:
            missing.append(f"{error}"[:_MOST_TEXT] or type(error).__name__)
    return PairsTested(order.number, tuple(links[:16]), tuple(missing[:16]))


async def _secret(path: Path, patience_s: float) -> bytes:
    """The secret, which the node that hosts the check may be about to make. Raises RunError where it does not come."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + patience_s
    while True:
        try:
            return wire.read_secret(path)
        except (OSError, WireError) as error:
            if loop.time() >= until_s:
                raise RunError(str(error)) from None
        await asyncio.sleep(_AGAIN_S)
