"""The launcher's own connection to the controller: joins, hears its place, reports deaths and the end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from keepstep import wire
from keepstep.core.errors import RunError, WireError
from keepstep.core.finding import Finding
from keepstep.core.incident import Recovery
from keepstep.launch.job import Endpoint, Job
from keepstep.launch.placement import Place

_REREAD_SECRET_S = 1.0
_LOOK_S = 0.5


class Link:
    """Connects for ever in the background; sending never waits for it. Findings are repeated to a new controller."""

    def __init__(
        self,
        job: Job,
        controller: Endpoint,
        secret: Path,
        join: wire.Join,
        *,
        stopped: Callable[[wire.Stop], None],
    ) -> None:
        """``controller.host`` is a numeric address; ``stopped`` is told when the controller ends the job."""
        self._job = job
        self._controller = controller
        self._secret = secret
        self._join = join
        self._stopped = stopped
        self._place: Place | None = None
        self._findings: list[Finding] = []
        self._ended: wire.Ended | None = None
        self._client: wire.Client | None = None
        self._answer: asyncio.Future[wire.Placement] = asyncio.get_running_loop().create_future()
        self._trouble = ""
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
            greet=self._greet,
            message=self._received,
            connected=self.connected.set,
            disconnected=self.connected.clear,
            trouble=self._note,
            tls=tls,
        )

    async def join(self, timeout_s: float) -> Place:
        """Wait for the other nodes and return this node's place.

        Raises:
            RunError: the controller refused, or not all nodes came within ``timeout_s``; says what was wrong last.
        """
        try:
            placed = await asyncio.wait_for(self._join_with_newest_secret(), timeout_s)
        except asyncio.TimeoutError:
            seen = self._trouble or "connected, but not all nodes have joined"
            raise RunError(
                f"no place in the job after {timeout_s:g} s: controller {self._controller}: {seen}; check that every "
                f"node was started with the same --rdzv-endpoint, --nnodes and secret ({self._secret})"
            ) from None
        self._place = Place(
            node_rank=placed.node_rank,
            first_rank=placed.first_rank,
            world_size=placed.world_size,
            node_count=placed.node_count,
            master_addr=placed.master_addr,
            master_port=placed.master_port,
            incarnation=placed.incarnation,
        )
        return self._place

    async def _join_with_newest_secret(self) -> wire.Placement:
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
            done, _ = await asyncio.wait([self._answer], timeout=_REREAD_SECRET_S)
            if done:
                return self._answer.result()

    def placed(self, place: Place) -> None:
        """The place is known without asking (one node)."""
        self._place = place

    def found(self, finding: Finding) -> None:
        """Report at once; again to a controller that is started anew."""
        self._findings.append(finding)
        if self._client:
            self._client.send(wire.Found(finding))

    def recovered(self, recovery: Recovery) -> None:
        """All ranks of this node train again after a restart."""
        self._findings = [one for one in self._findings if one.incarnation >= recovery.incarnation]
        if self._client:
            self._client.send(wire.Recovered(self._place.node_rank if self._place else -1, recovery))

    def ended(self, exit_code: int, message: str) -> None:
        """All workers of this node have ended."""
        self._ended = wire.Ended(self._place.node_rank if self._place else -1, exit_code, message)
        if self._client:
            self._client.send(self._ended)

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

    def _greet(self) -> list[wire.Message]:
        node_rank = self._place.node_rank if self._place else -1
        incarnation = self._place.incarnation if self._place else 0
        said: list[wire.Message] = [
            wire.Hello("launcher", self._job.node, node_rank, os.getpid(), incarnation),
            self._join
            if self._place is None
            else wire.Join(
                node=self._join.node,
                address=self._join.address,
                nproc=self._join.nproc,
                free_port=self._place.master_port,
                node_rank=node_rank,
                min_nodes=self._join.min_nodes,
                max_nodes=self._join.max_nodes,
            ),
        ]
        said += [wire.Found(finding) for finding in self._findings]
        if self._ended:
            said.append(self._ended)
        return said

    def _received(self, message: wire.Message) -> None:
        if isinstance(message, wire.Placement):
            if not self._answer.done():
                self._answer.set_result(message)
        elif isinstance(message, wire.Stop):
            self._stopped(message)
        elif isinstance(message, wire.Refused) and not self._answer.done() and self._place is None:
            self._answer.set_exception(RunError(f"controller {self._controller}: {message.reason}"))

    def _note(self, error: Exception, attempt: int) -> None:
        del attempt
        self._trouble = str(error)
