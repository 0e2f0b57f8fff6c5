"""The launcher's connection to the controller, over which it joins the job, reports failures and hears orders."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple

from msgspec import structs

from keepstep import wire
from keepstep.core.errors import LostJobError, RunError, WireError
from keepstep.core.within import within
from keepstep.launch.command import addresses, run_folder
from keepstep.launch.command.job import Job
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import Place
from keepstep.launch.controller.elections import Elections, now_s
from keepstep.launch.controller.late_names import addresses_of
from keepstep.launch.controller.member import Member
from keepstep.launch.local_run import LocalRun

PATIENCE_S = 60.0  # seconds that a node without workers waits for a connection before it ends
_REREAD_SECRET_S = 1.0
_LOOK_S = 0.5
_TRY_S = 5.0  # seconds for which one address is tried, and after which the host's name is looked up again
_STRANGER_S = 12.0  # seconds for which another job's controller may still be at this job's address
_ANEW_S = 3.0  # seconds for which a node without workers meets another run's controller before it ends


class Link:
    """Connects for ever in the background; sending never waits for it."""

    def __init__(
        self,
        run: LocalRun,
        controller: Endpoint,
        join: wire.Join,
        *,
        ordered: Callable[[], None],
        token: int = 0,
        elected: Callable[[], None] = lambda: None,
    ) -> None:
        """``controller.host`` is a numeric address. ``ordered`` is called when something new is in ``member``.

        ``token``: of this launcher's seat, where the controller can move; ``elected`` is then called about five times
        a second, to look whether its host has changed.
        """
        self._run, job = run, run.job
        self.controller = self._told = controller  # the address, as far as it is known, and as it was given
        self._next_try_s = self._next_look_up_s = now_s() + _TRY_S
        self._hosts_controller = join.hosts_controller
        self._ordered, self._elected = ordered, elected
        self._client: wire.Client | None = None
        self._changed = asyncio.Event()
        self._trouble = ""
        self.stranger = ""  # a message about another run's controller at the address of this run's
        self._stranger_at, self._stranger_since_s = controller, 0.0
        self._warned_of = ""
        # This node's, numeric, where the controller can move to another node.
        self.address = addresses.resolve(join.address)[0] if token else ""
        self._elections: Elections | None = None
        self.member = Member(join, os.getpid(), lambda: addresses.free_port(join.address), time.time)
        if token:
            self._elections = Elections(
                wire.Seat(token, join.node, os.getpid(), self.address, 0),
                tls=contexts(job),
                member_is_connected=self._is_led,
                changed=self._look,
                led=lambda: self.member.led(now_s()),
            )
        self.is_late = False  # the controller had moved before this launcher began
        self.connected = asyncio.Event()  # the newest controller is connected
        self.has_met = False  # a controller of this job has ever been connected

    def open(self) -> None:
        """Begin to connect.

        Raises AuthenticationError where the secret cannot be read (yet), UsageError where a certificate cannot be.
        """
        # What goes wrong is in the message of ``join``, so that the logger need not say it at every attempt.
        logging.getLogger("keepstep.wire").addHandler(logging.NullHandler())
        self._client = wire.Client(
            (self.controller.host, self.controller.port),
            wire.RunKey(wire.read_secret(self._run.secret), self._run.job.run_id),
            role="launcher",
            greet=self.member.greet,
            message=self._received,
            connected=self._on_connected,
            disconnected=self._on_disconnected,
            trouble=self._note,
            tls=contexts(self._run.job)[1],
        )

    def resign(self) -> None:
        """Let other nodes host the controller, because it cannot be kept running here."""
        if self.member.elector is not None:
            self.member.elector.resign(now_s())

    def _is_led(self) -> bool:
        return self.connected.is_set() and not self.member.is_void

    def _look(self) -> None:
        """Connect to the address at which the controller is now."""
        elector = self.member.elector
        assert elector is not None
        leader = elector.leader
        if leader.port:
            self._go_to(Endpoint(leader.address, leader.port))
        elif elector.council is None and not self.connected.is_set() and now_s() >= self._next_try_s:
            # The controller may have moved before this launcher began: the address that it was given and the one in
            # the run folder are tried in turn.
            self._next_try_s = now_s() + _TRY_S
            known = run_folder.controller(self._run.folder) if self.controller == self._told else None
            self._go_to(known or self._told)
        self._elected()

    def _go_to(self, controller: Endpoint) -> None:
        if controller != self.controller and self._client:
            self.controller = controller
            self._client.redirect(controller.host, controller.port)

    async def join(self, timeout_s: float) -> Place:
        """Wait for the other nodes and return this node's place; a spare waits for as long as the job lasts.

        Raises RunError, which says what was wrong last: refused, or not all nodes came within ``timeout_s``;
        LostJobError where a spare has not heard of its job for `PATIENCE_S`.
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
        if self.stranger:
            raise RunError(self.stranger)
        seen = self._trouble or "connected, but not all nodes have joined"
        raise RunError(
            f"no place in the job after {timeout_s:g} s: controller {self.controller}: {seen}; check that every "
            f"node was started with the same --rdzv-endpoint, --nnodes and secret ({self._run.secret})"
        )

    async def _join_with_newest_secret(self) -> Place:
        """Join with whatever secret there is now: node 0 may make it, or replace that of an earlier run, meanwhile."""
        tried: bytes | None = None
        while True:
            try:
                found = wire.read_secret(self._run.secret)
                if found != tried:
                    await self.close()
                    if self._elections is not None:
                        key = wire.RunKey(found, self._run.job.run_id)
                        self.member.vote(await self._elections.open(key), self._elections.elector)
                    self.open()
                    tried = found
            except (OSError, WireError) as error:
                self._trouble = str(error)
            if (place := self._taken()) is not None:
                return place
            if self.member.refusal:
                raise RunError(f"controller {self.controller}: {self.member.refusal}")
            if self.member.is_spare and self.member.away_s(now_s()) > PATIENCE_S:
                raise LostJobError(
                    self.stranger
                    or f"controller {self.controller}: {self._trouble}: the job is gone, or out of reach"
                )
            met_stranger = self.stranger and now_s() - self._stranger_since_s > _STRANGER_S
            if met_stranger and not self.member.is_spare:  # a spare waits on, as the job may go on elsewhere
                raise RunError(self.stranger)
            await self._look_up_again()
            await self._change(_REREAD_SECRET_S)

    async def _look_up_again(self) -> None:
        """Follow the controller's host to another address, which a pod has that is started anew."""
        endpoint = self._run.job.rendezvous.endpoint
        is_late = endpoint is not None and not self.connected.is_set() and now_s() >= self._next_look_up_s
        if endpoint is None or not is_late or self._hosts_controller:
            return
        self._next_look_up_s = now_s() + _TRY_S
        with contextlib.suppress(RunError):
            found = await addresses_of(endpoint.host)
            if self._told.host not in found:
                before, self._told = self._told, Endpoint(found[0], endpoint.port)
                if self.controller == before:
                    self._go_to(self._told)

    async def next_place(self) -> Place | None:
        """Wait for the place in the next incarnation; None when the controller stays away, or is another run's."""
        while (place := self._taken()) is None:
            elector = self.member.elector
            is_succeeded = self.stranger and (elector is None or not elector.can_elect)
            if self.member.away_s(now_s()) > PATIENCE_S or (
                is_succeeded and now_s() - self._stranger_since_s > _ANEW_S
            ):
                return None
            await self._change(_LOOK_S)
        return place

    async def _change(self, timeout_s: float) -> None:
        """Wait until something was ordered, not long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await within(timeout_s, self._changed.wait())
        self._changed.clear()

    def _taken(self) -> Place | None:
        placed = self.member.to_run
        if placed is None:
            return None
        self.member.started()
        return Place(*structs.astuple(placed))

    def placed(self, place: Place) -> None:
        """Take a place that is known without asking, as it is on one node."""
        self.member.place(wire.Placement(*astuple(place)))
        if self._client and self._client.connected:
            self.send(self.member.greet()[1:2])

    def send(self, messages: Sequence[wire.Message]) -> None:
        """Send what ``member`` says, once there is a connection."""
        for message in messages if self._client else ():
            assert self._client is not None
            self._client.send(message)

    async def drained(self, timeout_s: float) -> None:
        """Wait until all messages are on their way; not without a connection, and for ``timeout_s`` at most."""
        if self._client and self._client.connected:
            await self._client.drained(timeout_s)

    async def unseated(self, patience_s: float) -> None:
        """Wait until this node has no seat in the council any more, for ``patience_s`` at most.

        A node that leaves with its seat counts as lost in an election.
        """
        elector, until_s = self.member.elector, now_s() + patience_s
        while elector is not None and elector.has_seat and self.connected.is_set() and now_s() < until_s:
            await self._change(_LOOK_S)

    async def lost(self, patience_s: float) -> None:
        """Wait until the controller has been away for ``patience_s`` at a stretch."""
        while True:
            try:
                await within(patience_s, self.connected.wait())
            except asyncio.TimeoutError:
                return
            await asyncio.sleep(_LOOK_S)

    async def close(self) -> None:
        """End the connection for good."""
        if self._client:
            await self._client.close()
            self._client = None
        if self._elections is not None:
            await self._elections.close()

    def _received(self, message: wire.Message) -> None:
        self.send(self.member.received(message))
        self._run.rename(self.member.node)
        elector = self.member.elector
        if elector is not None and isinstance(message, wire.Welcome):
            self._on_welcome()
        elif elector is not None and elector.council is None and isinstance(message, wire.Moved):
            elector.learned(wire.Leads(message.term, message.address, message.port))
            self.is_late = True
        elif elector is not None and isinstance(message, wire.Council) and not self.member.is_void:
            kept = elector.received(message, now_s())
            self.send([kept] if kept is not None else [])
        self._changed.set()
        self._ordered()

    def _on_connected(self) -> None:
        if self.member.elector is None:
            self._on_welcome()

    def _on_welcome(self) -> None:
        """Note that the newest controller is connected, or leave a controller that has been replaced."""
        self.stranger = ""
        if self.member.is_void:
            assert self._client is not None
            self._client.reconnect()
            return
        self.member.connected()
        self.has_met = True
        self.connected.set()

    def _on_disconnected(self) -> None:
        self.member.disconnected(now_s())
        self.connected.clear()

    def _note(self, error: Exception, _: int) -> None:
        self._trouble = str(error)
        self._meet(error)
        self.member.trouble(error, now_s())

    def _meet(self, error: Exception) -> None:
        """Note whether another run's controller is at this run's address; workers that run go on all the same."""
        if isinstance(error, wire.AnotherJob):
            stranger = another_job(self.controller, error)
        elif isinstance(error, wire.Unproven) and self.has_met:
            stranger = f"another run has begun at {self.controller}, with another secret"
        else:
            if self.controller == self._stranger_at:  # an error at another address says nothing about it
                self.stranger = ""
            return
        if not self.stranger:
            self._stranger_since_s = now_s()
        self._stranger_at, self.stranger = self.controller, stranger
        if self.member.runs and self.stranger != self._warned_of:
            self._warned_of = self.stranger
            self._run.warn(f"{self.stranger}; the workers of this node train on without it")


def another_job(controller: Endpoint, error: wire.AnotherJob) -> str:
    """A message for the operator of a launcher that has met the controller of another job, and what to do about it."""
    return (
        f"the controller at {controller} runs {wire.job_named(error.theirs)}, this node was started for "
        f"{wire.job_named(error.ours)}: give this job its own --rdzv-endpoint, or the same --rdzv-id on all its nodes"
    )


def contexts(job: Job) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """TLS contexts of a server and of a client; None: no TLS. Raises UsageError where files cannot be loaded."""
    return (wire.server_context(job.tls), wire.client_context(job.tls)) if job.tls else (None, None)
