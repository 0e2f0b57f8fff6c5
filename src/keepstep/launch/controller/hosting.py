"""The controller's host: which node it is, and the controller's process where that is this node."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from keepstep.core import descriptors
from keepstep.core.errors import KeepstepError, RunError
from keepstep.core.own_folders import write_whole
from keepstep.core.within import within
from keepstep.launch.command import addresses, run_folder
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.local_run import LocalRun
from keepstep.launch.node.programs import Companion, controller_command, council_file, stop_file
from keepstep.launch.schedulers.kubernetes import is_pod

if TYPE_CHECKING:
    from keepstep.launch.controller.connection import Link
    from keepstep.launch.controller.lease import Elector

_READY_S = 30.0
_ASK_S = 3.0  # most seconds for finding out what uses the port


class Hosting:
    """Where the controller is, and its process when this node hosts it."""

    def __init__(
        self,
        run: LocalRun,
        *,
        ready: Callable[[], None],
        gave_up: Callable[[], None],
        moved: Callable[[], None],
    ) -> None:
        """``ready`` is called once the controller can be met here, ``moved`` when it is at another address.

        ``gave_up`` is called when it has died too often.
        """
        self._run, self._job = run, run.job
        self._on_ready, self._on_gave_up, self._on_moved = ready, gave_up, moved
        self.at: Endpoint | None = None  # the controller's address, once it is known
        self.met_at: Endpoint | None = None  # the address to which the link was led last
        self.is_here = False  # whether this node hosts it
        # This launcher's token, where the controller can move.
        self.seat = secrets.randbits(61) + 1 if self._job.elects else 0
        self.term = 1  # election term of the controller that runs here
        self._process: Companion | None = None
        self._ready = asyncio.Event()
        self._begun = asyncio.Event()  # the controller can be met, or died too often, or was ended
        self.has_given_up = False  # the controller died too often
        self._lost = ""
        self._moving: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The controller's process, when this node hosts it."""
        return self._process.pid if self._process else None

    @property
    def can_be_met(self) -> bool:
        """Whether the controller listens at ``at``, or another node sees to it that it will."""
        return self.at is not None and (self._ready.is_set() or self._job.rendezvous.endpoint is not None)

    async def can_begin(self) -> None:
        """Check that the controller of a job of several nodes can listen here and hold connections to all of them.

        Raises RunError where it cannot.
        """
        if trouble := descriptors.lack(self._job.max_nodes, descriptors.hard_limit()):
            raise RunError(trouble)
        listen = self._listen
        if listen.port and addresses.is_taken(listen.host, listen.port):
            raise RunError(await self._who_is_at(listen))

    @property
    def _listen(self) -> Endpoint:
        """The address at which the controller is to listen."""
        listen, endpoint = self._job.controller_listen, self._job.rendezvous.endpoint
        if listen is None and endpoint is not None:
            listen = Endpoint(addresses.listen_address(endpoint), endpoint.port)
        return listen or Endpoint("127.0.0.1", 0)

    async def _who_is_at(self, taken: Endpoint) -> str:
        """A sentence about what listens where the controller was to listen, and what to do about it."""
        from keepstep import wire
        from keepstep.launch.controller.connection import another_job, contexts

        # The caller's error says what is wrong, and the log would say it a second time.
        logging.getLogger("keepstep.wire").addHandler(logging.NullHandler())
        answers: asyncio.Queue[Exception | None] = asyncio.Queue()
        other = "another program"
        try:
            key = wire.RunKey(wire.read_secret(self._run.secret), self._job.run_id)
            client = wire.Client(
                (taken.host, taken.port),
                key,
                role="client",
                greet=lambda: (),
                message=lambda message: None,
                connected=lambda: answers.put_nowait(None),
                trouble=lambda error, attempt: answers.put_nowait(error),
                tls=contexts(self._job)[1],
            )
            try:
                answer = await within(_ASK_S, answers.get())
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
        """Start the controller here. Raises KeepstepError or OSError where there is no secret that it could use."""
        if run_folder.ensure_secret(self._run.secret) and self._job.secret_file:
            self._run.say(f"made a new secret: {self._run.secret}; every node needs this file")
        self.at = self._listen
        self._launch()

    async def is_ready(self) -> None:
        """Wait until nodes can meet at the controller that was started here. Raises RunError where they cannot."""
        try:
            await within(_READY_S, self._ready.wait())
        except asyncio.TimeoutError:
            self._lost = "is not ready"
        if self._lost:
            raise RunError(
                f"the controller at {self.at} {self._lost}: the nodes cannot meet; "
                "is the port of --rdzv-endpoint taken?"
            )

    async def begun(self) -> None:
        """Wait until a controller that was started here can be met, or has died too often."""
        if self._process:
            await self._begun.wait()

    def look(self, link: Link) -> None:
        """Host the controller, or stop hosting it, or follow it to another node, as the election says."""
        elector = link.member.elector
        assert elector is not None
        if self._moving is not None and not self._moving.done():
            return
        if link.is_late and self.is_here and not elector.leads:
            self.is_here = (
                False  # what runs here shows others that come late the way, as nobody has a place from it
            )
        if elector.inheritance is not None and elector.leads != (self.term if self.is_here else 0):
            self._moving = asyncio.get_running_loop().create_task(self._move(link, elector, elector.leads))
        elif not elector.leads and link.connected.is_set() and link.controller != self.met_at:
            self.met_at = self.at = link.controller
            self._run.say(f"the controller is at {self.at} now")
            self._on_moved()

    def may_end(self) -> None:
        """Do not start the controller again when it ends, nor tell that it is ready: its work is done."""
        if self._process:
            self._process.may_end()

    async def settled(self) -> None:
        """Wait until a move of the controller to or from this node is over."""
        if self._moving:
            await self._moving

    async def stop(self) -> None:
        """End the controller's process, if it runs here."""
        self._begun.set()
        if self._telling:
            self._telling.cancel()
        if self._process:
            await self._process.stop(self._job.linger_s)
            self._process = None

    async def _move(self, link: Link, elector: Elector, term: int) -> None:
        import msgspec

        from keepstep import wire
        from keepstep.launch.controller.late_comers import tell_late_comers

        await self.stop()
        self.is_here = False
        if not term:
            return
        lack = descriptors.lack(self._job.max_nodes, descriptors.hard_limit())
        council = council_file(self._run.folder, term)
        try:
            if not lack:
                write_whole(council, msgspec.json.encode(elector.inheritance))
                stop_file(council).unlink(missing_ok=True)  # a file of this name is from an earlier run
        except OSError as error:
            lack = f"{self._run.folder}: {error.strerror}"
        if lack:
            self._run.warn(f"this node cannot host the controller: {lack}")
            link.resign()
            return
        self.is_here, self.term = True, term
        self.at = self.met_at = Endpoint(link.address, self._port_at(link.address))
        self._run.say(f"the controller's node is away; it runs here now, at {self.at}")
        self._launch()
        elector.serves(self.at.port)
        self._on_moved()
        moved = wire.Moved(term, self.at.host, self.at.port)
        self._telling = asyncio.get_running_loop().create_task(tell_late_comers(self._run, moved))

    def _port_at(self, address: str) -> int:
        """A port for a controller that comes here: where the job began the same one, which late comers know.

        In a pod, too, which has its address for itself: who looks for the controller need not know its port.
        """
        meeting = self._job.rendezvous
        began_here = is_pod(os.environ) or (meeting.backend == "static" and meeting.node_rank == 0)
        port = meeting.endpoint.port if meeting.endpoint and began_here else 0
        return port if port and not addresses.is_taken(address, port) else addresses.free_port(address)

    def _launch(self) -> None:
        assert self.at is not None
        at = self.at

        def ready(said: dict[str, object]) -> None:
            nonlocal at
            port = said.get("port")
            if isinstance(port, int):
                self.at = at = replace(at, port=port)  # a later start has to use the same port
            if not self._ready.is_set():
                self._ready.set()
                self._on_ready()
            self._begun.set()

        def command() -> list[str]:
            where = (self._job, self._run.folder, self._run.secret, at)
            return controller_command(*where, seat=self.seat, term=self.term)

        def gave_up(reason: str) -> None:
            self.has_given_up = True
            self._begun.set()
            self._on_gave_up()
            if self._job.rendezvous.endpoint and not self._ready.is_set():
                self._lost = reason
                self._ready.set()
                return
            self._run.warn(f"the controller {reason} (see {self._run.folder}/controller.log): no verdicts")

        self._process = Companion("controller", command, self._run.processes, gave_up=gave_up, ready=ready)
        self._process.start()
