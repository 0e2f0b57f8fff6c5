"""The launcher's own connection to the controller: joins, hears its place, reports deaths and the end."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from keepstep import wire
from keepstep.core.budgets import Cause
from keepstep.core.errors import RunError, WireError
from keepstep.core.finding import Finding
from keepstep.core.incident import Recovery
from keepstep.launch.job import Endpoint, Job
from keepstep.launch.membership import Membership
from keepstep.launch.placement import Place

PATIENCE_S = 60.0  # without a connection and with no worker running: nobody will begin again with us
_REREAD_SECRET_S = 1.0
_LOOK_S = 0.5


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
    ) -> None:
        """``controller.host`` is a numeric address; ``ordered`` is told when something new is in ``member``."""
        self._job = job
        self._controller = controller
        self._secret = secret
        self._ordered = ordered
        self._client: wire.Client | None = None
        self._changed = asyncio.Event()
        self._trouble = ""
        self.member = Membership(join, os.getpid(), free_port, time.time)
        self.connected = asyncio.Event()

    def open(self) -> None:
        """Begin to connect.

        Raises:
            AuthenticationError: the secret cannot be read (yet).
            UsageError: the certificates cannot be loaded.
        """
        # What goes wrong on the way is told by ``join`` once, not by the logger at every attempt.
        logging.getLogger("keepstep.wire").addHandler(logging.NullHandler())
        tls = None
        if self._job.tls:
            paths = wire.TlsPaths(str(self._job.tls.cert), str(self._job.tls.key), str(self._job.tls.ca))
            tls = wire.client_context(paths)
        self._client = wire.connect(
            (self._controller.host, self._controller.port),
            wire.read_secret(self._secret),
            role="launcher",
            greet=self.member.greet,
            message=self._received,
            connected=self._on_connected,
            disconnected=self._on_disconnected,
            trouble=self._note,
            tls=tls,
        )

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
                    self.open()
                    tried = found
            except WireError as error:
                self._trouble = str(error)
            if (place := self._taken()) is not None:
                return place
            if self.member.refusal:
                raise RunError(f"controller {self._controller}: {self.member.refusal}")
            if self.member.is_spare and self.member.away_s(_now_s()) > PATIENCE_S:
                raise RunError(
                    f"controller {self._controller}: {self._trouble}: the job is gone, or out of reach"
                )
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
        self._send(self.member.failed(exit_code, text, cause.rank, cause.step, cause.at_s))

    def halted(self, unfit: str = "") -> None:
        """No worker of this incarnation runs here any more; ``unfit``: why none should again."""
        self._send(self.member.halted(unfit))

    def sealed(self, incarnation: int, step: int) -> None:
        """All ranks of this node have sealed a step; -1: they keep no snapshots."""
        self._send([wire.Sealed(incarnation, step)])

    def ended(self, exit_code: int, message: str) -> None:
        """All workers of this node have ended."""
        self._send(self.member.ended(exit_code, message))

    async def drained(self, timeout_s: float) -> None:
        """Wait until what was said is on its way; not long, and not without a connection."""
        if self._client and self._client.connected:
            await self._client.drained(timeout_s)

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

    def _send(self, messages: list[wire.Message]) -> None:
        for message in messages if self._client else ():
            assert self._client is not None
            self._client.send(message)

    def _received(self, message: wire.Message) -> None:
        self._send(self.member.received(message))
        self._changed.set()
        self._ordered()

    def _on_connected(self) -> None:
        self.member.connected()
        self.connected.set()

    def _on_disconnected(self) -> None:
        self.member.disconnected(_now_s())
        self.connected.clear()

    def _note(self, error: Exception, attempt: int) -> None:
        del attempt
        self._trouble = str(error)
        self.member.trouble(error, _now_s())


def _now_s() -> float:
    return asyncio.get_running_loop().time()
