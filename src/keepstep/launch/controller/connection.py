"""The launcher's own connection to the controller: joins, hears its place, reports deaths and the end."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from keepstep import wire
from keepstep.core.budgets import Cause
from keepstep.core.errors import RunError, WireError
from keepstep.core.finding import Finding
from keepstep.core.incident import Recovery
from keepstep.core.own_folders import write_whole
from keepstep.launch.command import addresses
from keepstep.launch.command.job import Job
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import Place
from keepstep.launch.controller.elections import Elections
from keepstep.launch.controller.member import Member
from keepstep.launch.node.programs import stop_file

PATIENCE_S = 60.0  # without a connection and with no worker running: nobody will begin again with us
_REREAD_SECRET_S = 1.0
_LOOK_S = 0.5
_TRY_S = 5.0  # for one address
# For the controller of another job to end, which this one may follow at its address, and to try another address.
_STRANGER_S = 12.0


class Link:
    """Connects for ever in the background; sending never waits for it. What is said and ordered is in ``member``."""

    def __init__(
        self,
        job: Job,
        controller: Endpoint,
        secret: Path,
        join: wire.Join,
        *,
        free_port: Callable[[], int],
        ordered: Callable[[], None],
        token: int = 0,
        elected: Callable[[], None] = lambda: None,
        known: Callable[[], Endpoint | None] = lambda: None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``controller.host`` is a numeric address; ``ordered`` is told when something new is in ``member``.

        ``warn``: of what the operator should know while workers run, and nobody else says.
        ``token``: of our seat where the controller can move; ``elected`` is then told when `leads` may have changed,
        and ``known`` asked for the address of a controller that others know.
        """
        self._job = job
        self._controller = self._told = controller
        self._next_try_s = _now_s() + _TRY_S
        self._secret = secret
        self._ordered = ordered
        self._client: wire.Client | None = None
        self._changed = asyncio.Event()
        self._trouble = ""
        self._stranger = ""  # the controller of another job is there instead of ours, and since when
        self._stranger_at, self._stranger_since_s = controller, 0.0
        self._warned_of = ""
        self._elected, self._known, self._warn = elected, known, warn
        self.address = addresses.resolve(join.address)[0] if token else ""
        self._elections: Elections | None = None
        self.member = Member(join, os.getpid(), free_port, time.time)
        if token:
            self._elections = Elections(
                *(token, join.node, os.getpid(), self.address),
                tls=contexts(job),
                member_is_connected=self._is_led,
                changed=self._look,
                led=lambda: self.member.led(_now_s()),
            )
        self.connected = asyncio.Event()

    def open(self) -> None:
        """Begin to connect.

        Raises:
            AuthenticationError: the secret cannot be read (yet).
            UsageError: the certificates cannot be loaded.
        """
        # What goes wrong on the way is told by ``join`` once, not by the logger at every attempt.
        logging.getLogger("keepstep.wire").addHandler(logging.NullHandler())
        tls = contexts(self._job)
        self._client = wire.connect(
            (self._controller.host, self._controller.port),
            wire.RunKey(wire.read_secret(self._secret), self._job.run_id),
            role="launcher",
            greet=self.member.greet,
            message=self._received,
            connected=self._on_connected,
            disconnected=self._on_disconnected,
            trouble=self._note,
            tls=tls[1] if tls is not None else None,
        )

    @property
    def controller(self) -> Endpoint:
        """Where the controller is, as far as is known."""
        return self._controller

    @property
    def stranger(self) -> str:
        """What to say when the controller of another job is where ours should be; "": it is not."""
        return self._stranger

    @property
    def leads(self) -> int:
        """The term in which the controller is to run beside us; 0: elsewhere."""
        elector = self.member.elector
        return elector.leads if elector is not None else 0

    @property
    def council(self) -> wire.Council | None:
        """What the controller that runs beside us has to know."""
        return self.member.elector.inheritance if self.member.elector is not None else None

    def keep_council(self, path: Path) -> None:
        """Write it down for the controller, which none of this term has come before. Raises OSError."""
        write_whole(path, msgspec.json.encode(self.council))
        stop_file(path).unlink(missing_ok=True)

    def serves(self, port: int) -> None:
        """The controller beside us listens here, or will in a moment."""
        if self.member.elector is not None:
            self.member.elector.serves(port)

    def resign(self) -> None:
        """No controller can be kept running here."""
        if self.member.elector is not None:
            self.member.elector.resign(_now_s())

    def _is_led(self) -> bool:
        return self.connected.is_set() and not self.member.is_void

    def _look(self) -> None:
        """Go where the controller is."""
        elector = self.member.elector
        assert elector is not None
        leader = elector.leader
        if leader.port:
            self._go_to(Endpoint(leader.address, leader.port))
        elif elector.council is None and not self.connected.is_set() and _now_s() >= self._next_try_s:
            # The job may have moved before we came: try in turn what we were told and what the run's folder says.
            self._next_try_s = _now_s() + _TRY_S
            known = self._known() if self._controller == self._told else None
            self._go_to(known or self._told)
        self._elected()

    def _go_to(self, controller: Endpoint) -> None:
        if controller != self._controller and self._client:
            self._controller = controller
            self._client.redirect(controller.host, controller.port)

    async def join(self, timeout_s: float) -> Place:
        """Wait for the other nodes and return this node's place; a spare waits for as long as the job lasts.

        Raises:
            RunError: the controller refused, or not all nodes came within ``timeout_s``; says what was wrong last.
        """
        waiting = asyncio.get_running_loop().create_task(self._join_with_newest_secret())
        try:
            await asyncio.wait([waiting], timeout=timeout_s)
            if not waiting.done() and self.member.is_spare:
                await waiting
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
        if self._stranger:
            raise RunError(self._stranger)
        seen = self._trouble or "connected, but not all nodes have joined"
        raise RunError(
            f"no place in the job after {timeout_s:g} s: controller {self._controller}: {seen}; check that every "
            f"node was started with the same --rdzv-endpoint, --nnodes and secret ({self._secret})"
        )

    async def _join_with_newest_secret(self) -> Place:
        """The secret may appear, or be replaced by that of the new run, while we wait for node 0."""
        tried: bytes | None = None
        while True:
            try:
                found = wire.read_secret(self._secret)
                if found != tried:
                    await self.close()
                    if self._elections is not None:
                        key = wire.RunKey(found, self._job.run_id)
                        self.member.vote(await self._elections.open(key), self._elections.elector)
                    self.open()
                    tried = found
            except (OSError, WireError) as error:
                self._trouble = str(error)
            if (place := self._taken()) is not None:
                return place
            if self.member.refusal:
                raise RunError(f"controller {self._controller}: {self.member.refusal}")
            if self.member.is_spare and self.member.away_s(_now_s()) > PATIENCE_S:
                raise RunError(
                    self._stranger
                    or f"controller {self._controller}: {self._trouble}: the job is gone, or out of reach"
                )
            met_stranger = self._stranger and _now_s() - self._stranger_since_s > _STRANGER_S
            if met_stranger and not self.member.is_spare:  # a spare stays: the job may go on elsewhere
                raise RunError(self._stranger)
            await self._change(_REREAD_SECRET_S)

    async def next_place(self) -> Place | None:
        """After `halted`: the place in the next incarnation; None when the controller stays away for too long."""
        while (place := self._taken()) is None:
            if self.member.away_s(_now_s()) > PATIENCE_S:
                return None
            await self._change(_LOOK_S)
        return place

    async def _change(self, timeout_s: float) -> None:
        """Until something was ordered, not long. (``wait_for`` would lose a cancellation that comes with it.)"""
        waiting = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([waiting], timeout=timeout_s)
        finally:
            waiting.cancel()
        self._changed.clear()

    def _taken(self) -> Place | None:
        placed = self.member.to_run
        if placed is None:
            return None
        self.member.started()
        return Place(
            node_rank=placed.node_rank,
            first_rank=placed.first_rank,
            world_size=placed.world_size,
            node_count=placed.node_count,
            master_addr=placed.master_addr,
            master_port=placed.master_port,
            incarnation=placed.incarnation,
            pauses=placed.pauses,
        )

    def placed(self, place: Place) -> None:
        """The place is known without asking (one node)."""
        self.member.place(
            wire.Placement(
                place.node_rank,
                place.first_rank,
                place.world_size,
                place.node_count,
                place.master_addr,
                place.master_port,
                place.incarnation,
                place.pauses,
            )
        )
        if self._client and self._client.connected:
            self._send(self.member.greet()[1:2])

    def found(self, finding: Finding) -> None:
        """Report at once; again to a controller that is started anew."""
        self._send(self.member.found(finding))

    def recovered(self, recovery: Recovery) -> None:
        """All ranks of this node train again after a restart."""
        self._send(self.member.recovered(recovery))

    def failed(self, exit_code: int, cause: Cause) -> None:
        """Workers of this node have failed: all nodes are to begin again."""
        text = f"rank {cause.rank}: {cause.error}"
        self._send(self.member.failed(exit_code, text, cause.rank, cause.step, cause.at_s, cause.by_keepstep))

    def halted(self, unfit: str = "", rigid: str = "") -> None:
        """No worker of this incarnation runs here any more.

        ``unfit``: why none should again. ``rigid``: why none can in a job of another size.
        """
        self._send(self.member.halted(unfit, rigid))

    def sealed(self, incarnation: int, step: int, why: str = "") -> None:
        """All ranks of this node have sealed a step; -1: they seal none, and ``why``."""
        self._send([wire.Sealed(incarnation, step, why)])

    def ended(self, exit_code: int, message: str) -> None:
        """All workers of this node have ended."""
        self._send(self.member.ended(exit_code, message))

    async def drained(self, timeout_s: float) -> None:
        """Wait until what was said is on its way; not long, and not without a connection."""
        if self._client and self._client.connected:
            await self._client.drained(timeout_s)

    async def unseated(self, patience_s: float) -> None:
        """Wait until the others can elect without us, not long: gone before, we would be one of those that are lost."""
        elector, until_s = self.member.elector, _now_s() + patience_s
        while elector is not None and elector.has_seat and self.connected.is_set() and _now_s() < until_s:
            await self._change(_LOOK_S)

    async def lost(self, patience_s: float) -> None:
        """Until the controller has been away for ``patience_s`` at a stretch."""
        while True:
            try:
                await asyncio.wait_for(self.connected.wait(), patience_s)
            except asyncio.TimeoutError:
                return
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """Leave."""
        if self._client:
            await self._client.close()
            self._client = None
        if self._elections is not None:
            await self._elections.close()

    def _send(self, messages: list[wire.Message]) -> None:
        for message in messages if self._client else ():
            assert self._client is not None
            self._client.send(message)

    def _received(self, message: wire.Message) -> None:
        self._send(self.member.received(message))
        elector = self.member.elector
        if elector is not None and isinstance(message, wire.Welcome):
            self._on_welcome()
        elif elector is not None and isinstance(message, wire.Council) and not self.member.is_void:
            kept = elector.received(message, _now_s())
            self._send([kept] if kept is not None else [])
        self._changed.set()
        self._ordered()

    def _on_connected(self) -> None:
        if self.member.elector is None:
            self._on_welcome()

    def _on_welcome(self) -> None:
        """The controller is there, and it is the newest."""
        self._stranger = ""
        if self.member.is_void:
            assert self._client is not None
            self._client.reconnect()
            return
        self.member.connected()
        self.connected.set()

    def _on_disconnected(self) -> None:
        self.member.disconnected(_now_s())
        self.connected.clear()

    def _note(self, error: Exception, attempt: int) -> None:
        del attempt
        self._trouble = str(error)
        self._meet(error)
        self.member.trouble(error, _now_s())

    def _meet(self, error: Exception) -> None:
        """Note whether it is another job's controller that keeps ours away. Workers that run do not mind."""
        if not isinstance(error, wire.AnotherJob):
            if self._controller == self._stranger_at:  # another address may be tried meanwhile
                self._stranger = ""
            return
        if not self._stranger:
            self._stranger_since_s = _now_s()
        self._stranger_at = self._controller
        self._stranger = another_job(self._controller, error)
        if self.member.runs and self._stranger != self._warned_of:
            self._warned_of = self._stranger
            self._warn(f"{self._stranger}; the workers of this node train on without it")


def another_job(controller: Endpoint, error: wire.AnotherJob) -> str:
    """What to tell an operator whose launcher has met the controller of another job, and what to do."""
    return (
        f"the controller at {controller} runs {wire.job_named(error.theirs)}, this node was started for "
        f"{wire.job_named(error.ours)}: give this job its own --rdzv-endpoint, or the same --rdzv-id on all its nodes"
    )


def contexts(job: Job) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """TLS of a server and of a client; None: the job has none. Raises UsageError: the files cannot be loaded."""
    if job.tls is None:
        return None
    paths = wire.TlsPaths(str(job.tls.cert), str(job.tls.key), str(job.tls.ca))
    return wire.server_context(paths), wire.client_context(paths)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
