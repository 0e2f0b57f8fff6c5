"""Where the job's controller is, and its process when that is this node. With ``--no-elect`` it does not move."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from keepstep.core import descriptors
from keepstep.core.errors import KeepstepError, RunError
from keepstep.launch.command import addresses, run_folder
from keepstep.launch.command.job import Job
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.node.programs import Companion, controller_command, council_file
from keepstep.launch.workers.guard import Guard
from keepstep.launch.workers.processes import Processes

if TYPE_CHECKING:
    from keepstep.launch.controller.connection import Link

_READY_S = 30.0
_ASK_S = 3.0  # most seconds for finding out who has taken the port


class Hosting:
    """``at``: the controller's address, None before it is known. ``is_here``: this node hosts it."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        secret: Path,
        processes: Processes,
        guard: Guard,
        *,
        ready: Callable[[], None],
        gave_up: Callable[[], None],
        moved: Callable[[], None],
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """``ready``: told once it can be met here; ``gave_up``: it died too often; ``moved``: here, or elsewhere."""
        self._job, self._folder, self._secret = job, folder, secret
        self._processes, self._guard = processes, guard
        self._on_ready, self._on_gave_up, self._on_moved = ready, gave_up, moved
        self._say, self._warn = say, warn
        self.at: Endpoint | None = None
        self.is_here = False
        self.seat = secrets.randbits(61) + 1 if job.elects else 0
        self.term = 1  # of the controller that runs here
        self._process: Companion | None = None
        self._ready = asyncio.Event()
        self._lost = ""
        self._moving: asyncio.Task[None] | None = None
        self._met_at: Endpoint | None = None  # where the link was led last

    @property
    def pid(self) -> int | None:
        """The controller's process, when it is here."""
        return self._process.pid if self._process else None

    @property
    def is_started(self) -> bool:
        """Its process is kept running here."""
        return self._process is not None

    @property
    def can_be_met(self) -> bool:
        """It listens at ``at``, or others see to it that it will."""
        return self.at is not None and (self._ready.is_set() or self._job.rendezvous.endpoint is not None)

    async def can_begin(self) -> None:
        """Whether the controller of a job of several nodes can listen here, and have a connection to all of them.

        Raises:
            RunError: it cannot, and why.
        """
        if trouble := descriptors.lack(self._job.max_nodes, descriptors.hard_limit()):
            raise RunError(trouble)
        listen = self._listen
        if listen.port and addresses.is_taken(listen.host, listen.port):
            raise RunError(await self._who_is_at(listen))

    @property
    def _listen(self) -> Endpoint:
        """Where the controller is to listen."""
        listen, endpoint = self._job.controller_listen, self._job.rendezvous.endpoint
        if listen is None and endpoint is not None:
            listen = Endpoint(addresses.listen_address(endpoint), endpoint.port)
        return listen or Endpoint("127.0.0.1", 0)

    async def _who_is_at(self, taken: Endpoint) -> str:
        """What listens where the controller was to listen, and what to do about it."""
        from keepstep import wire
        from keepstep.launch.controller.connection import another_job, contexts

        # The error that is raised tells it; the log would say it a second time.
        logging.getLogger("keepstep.wire").addHandler(logging.NullHandler())
        answers: asyncio.Queue[Exception | None] = asyncio.Queue()
        other = "another program"
        try:
            key = wire.RunKey(wire.read_secret(self._secret), self._job.run_id)
            tls = contexts(self._job)
            client = wire.connect(
                (taken.host, taken.port),
                key,
                role="client",
                greet=lambda: (),
                message=lambda message: None,
                connected=lambda: answers.put_nowait(None),
                trouble=lambda error, attempt: answers.put_nowait(error),
                tls=tls[1] if tls is not None else None,
            )
            try:
                answer = await asyncio.wait_for(answers.get(), _ASK_S)
            finally:
                await client.close()
            if isinstance(answer, wire.AnotherJob):
                return another_job(taken, answer)
            if isinstance(answer, wire.Unproven):
                other = "the controller of a job with another secret"
            elif answer is None:
                return (
                    f"a controller of this job is at {taken} already: start only one node as its host "
                    "(--node-rank 0, or is_host in --rdzv-conf)"
                )
        except (KeepstepError, OSError, asyncio.TimeoutError):
            pass  # no secret exists yet, or nothing answers there
        return (
            f"{taken} is in use by {other}, the nodes cannot meet there: "
            "give another --rdzv-endpoint, or end what uses it"
        )

    def start(self) -> None:
        """Start the controller here.

        Raises:
            KeepstepError, OSError: there is no secret that it could use.
        """
        if run_folder.ensure_secret(self._secret) and self._job.secret_file:
            self._say(f"made a new secret: {self._secret}; every node needs this file")
        self.at = self._listen
        self._launch()

    async def is_ready(self) -> None:
        """Wait until nodes can meet there.

        Raises:
            RunError: they cannot.
        """
        try:
            await asyncio.wait_for(self._ready.wait(), _READY_S)
        except asyncio.TimeoutError:
            self._lost = "is not ready"
        if self._lost:
            raise RunError(
                f"the controller at {self.at} {self._lost}: the nodes cannot meet; "
                "is the port of --rdzv-endpoint taken?"
            )

    def met(self, at: Endpoint) -> None:
        """The link begins there."""
        self._met_at = at

    def look(self, link: Link) -> None:
        """Another node may host the controller now, or this one has to, or not any more."""
        if self._moving is not None and not self._moving.done():
            return
        if link.council is not None and link.leads != (self.term if self.is_here else 0):
            self._moving = asyncio.get_running_loop().create_task(self._move(link, link.leads))
        elif not link.leads and link.connected.is_set() and link.controller != self._met_at:
            self._met_at = self.at = link.controller
            self._say(f"the controller is at {self.at} now")
            self._on_moved()

    def may_end(self) -> None:
        """Its work is done: when it ends now, it is not started again."""
        if self._process:
            self._process.may_end()

    async def settled(self) -> None:
        """It does not move any more."""
        if self._moving:
            await self._moving

    async def stop(self) -> None:
        """End its process here."""
        if self._process:
            await self._process.stop(self._job.linger_s)
            self._process = None

    async def _move(self, link: Link, term: int) -> None:
        await self.stop()
        self.is_here = False
        if not term:
            return
        lack = descriptors.lack(self._job.max_nodes, descriptors.hard_limit())
        try:
            if not lack:
                link.keep_council(council_file(self._folder, term))
        except OSError as error:
            lack = f"{self._folder}: {error.strerror}"
        if lack:
            self._warn(f"this node cannot host the controller: {lack}")
            link.resign()
            return
        self.is_here, self.term = True, term
        self.at = self._met_at = Endpoint(link.address, addresses.free_port(link.address))
        self._say(f"the controller's node is away; it runs here now, at {self.at}")
        self._launch()
        link.serves(self.at.port)
        self._on_moved()

    def _launch(self) -> None:
        def ready(said: dict[str, object]) -> None:
            assert self.at is not None
            port = said.get("port")
            if isinstance(port, int):
                self.at = replace(self.at, port=port)  # started again it must be found at the same place
            if not self._ready.is_set():
                self._ready.set()
                self._on_ready()

        def command() -> list[str]:
            assert self.at is not None
            where = (self._job, self._folder, self._secret, self.at)
            return controller_command(*where, seat=self.seat, term=self.term)

        def gave_up(reason: str) -> None:
            self._on_gave_up()
            if self._job.rendezvous.endpoint and not self._ready.is_set():
                self._lost = reason
                self._ready.set()
                return
            self._warn(f"the controller {reason} (see {self._folder}/controller.log): no verdicts")

        self._process = Companion(
            "controller", command, self._processes, self._guard, gave_up=gave_up, ready=ready
        )
        self._process.start()
