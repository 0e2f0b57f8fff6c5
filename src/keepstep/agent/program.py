"""The agent as a process: its event loop, connection and signals, and ending the workers if the launcher dies."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ClassVar

from keepstep import wire
from keepstep.agent.arguments import Arguments
from keepstep.agent.for_viewers import ForViewers
from keepstep.agent.hearing import Hearing
from keepstep.agent.node import NodeAgent
from keepstep.agent.sensors.gpus import Gpus
from keepstep.agent.sensors.ports import PortSensor
from keepstep.agent.sensors.processes import alive, identify, kill_carriers
from keepstep.agent.services.checkpoints import Checkpoints, Place
from keepstep.agent.services.checksums import ChecksumTeller
from keepstep.agent.services.node_backups import NodeBackups
from keepstep.agent.services.obeying import Obeying
from keepstep.agent.services.path_probes import echo_server, is_elsewhere, probe_paths
from keepstep.checkpoint.memory.slots import Key
from keepstep.core.errors import KeepstepError
from keepstep.core.log_lines import log_into
from keepstep.core.own_address import address_towards

logger = logging.getLogger("keepstep.agent")

_MOST_PROBES = 4  # requests for probes that are kept while one is being answered
_POLL_S = 0.05
_SLOW_POLL_S = 0.2  # time between polls from which on short iterations are taken together, too
_SLOWEST_POLL_S = 0.5  # where they are taken together
_IDLE_POLL_S = 0.1
_QUIET_POLLS = 100
_FILLED = 0.25  # share of a ring that may be written between two polls, whatever the polls cost
_CPU_SHARE = 0.018  # share of one core above which the agent polls less often
_DYING_S = 0.05
_SAVE_S = 1.0  # from an incident until rings are saved for it
_PR_SET_PDEATHSIG = 1


class Program:
    """Runs a ``NodeAgent`` until its launcher is gone or it gets a signal to end. Made in the event loop."""

    def __init__(self, arguments: Arguments, parent: int) -> None:
        """``parent``: process ID of the launcher; -1: it is gone already."""
        self._arguments = arguments
        self._parent = parent
        self._launcher = identify(parent)
        self._stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        self._heartbeat_s = 1.0
        self._interval_s = _POLL_S
        self._quiet = 0
        self._next_beat_s = self._polled_s = 0.0
        self._cpu_s, self._cpu_since_s = time.process_time(), time.monotonic()
        self._failure: Exception | None = None
        self._saving: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._key = wire.RunKey(wire.read_secret(arguments.secret_file), arguments.run_id)
        self._echo = echo_server(self._key)
        self._probing, self._probes = asyncio.Lock(), 0
        self._gpus = Gpus()
        self._gpus.start()
        self._ports = PortSensor()
        self._ports.start()
        self._agent = NodeAgent(
            arguments.rings,
            arguments.node,
            arguments.node_rank,
            arguments.run_dir,
            self._send,
            arguments.orders,
            arguments.links,
            self._gpus,
            arguments.workers,
            self._ports,
        )
        self._hearing = Hearing(
            *(arguments.node_rank, arguments.words, arguments.kernel_log, self._agent.pids, self._gpus),
            incarnation=arguments.incarnation,
        )
        self._obeying = Obeying(self._agent, arguments.node_rank, arguments.run_dir, self._send)
        self._backups = self._started_backups()
        self._checkpoints = self._started_checkpoints()
        self._checksums = self._started_checksums()
        self._for_viewers = ForViewers(
            self._agent.network,
            lambda: self._checkpoints.kept if self._checkpoints is not None else wire.KeptSteps(),
            arguments.run_dir / "nodes" / str(arguments.node_rank),
        )
        self._client = wire.Client(
            arguments.controller,
            self._key,
            role="agent",
            greet=self._greet,
            message=self._received,
            connected=lambda: logger.info("connected to the controller at %s:%d", *arguments.controller),
            disconnected=lambda: logger.info("the connection to the controller is lost"),
            tls=wire.client_context(arguments.tls) if arguments.tls else None,
        )

    async def main(self) -> None:
        self._tick()
        await self._stop.wait()
        await self._end()
        if self._failure is not None:
            raise self._failure

    def _started_checkpoints(self) -> Checkpoints | None:
        arguments = self._arguments
        if not arguments.cache or not arguments.world_size:
            return None
        place = Place(
            cache=arguments.cache,
            ranks=tuple(sorted(arguments.rings)),
            node_rank=arguments.node_rank,
            world_size=arguments.world_size,
            folder=arguments.run_dir / "nodes" / str(arguments.node_rank),
            storage=arguments.checkpoint_dir,
            keep=arguments.checkpoint_keep,
        )
        try:
            checkpoints = Checkpoints(place, self._backups, self._sender())
            checkpoints.start()
        except KeepstepError as error:
            logger.error("checkpoints stay in this node's cache: %s", error)
            return None
        return checkpoints

    def _started_checksums(self) -> ChecksumTeller | None:
        arguments = self._arguments
        if self._checkpoints is None or arguments.world_size < 2:
            return None
        ranks, place = arguments.rings.keys(), (arguments.node_rank, arguments.world_size)
        checksums = ChecksumTeller(self._checkpoints.states, ranks, *place, self._sender())
        checksums.start()
        return checksums

    def _sender(self) -> Callable[[wire.Message], None]:
        """A function by which other threads send messages."""
        loop = asyncio.get_running_loop()

        def send(message: wire.Message) -> None:
            with contextlib.suppress(RuntimeError):  # the agent's loop has ended
                loop.call_soon_threadsafe(self._send, message)

        return send

    def _started_backups(self) -> NodeBackups | None:
        arguments, tls = self._arguments, self._arguments.tls
        if not arguments.cache or not arguments.backups:
            return None
        backups = NodeBackups(
            arguments.cache,
            arguments.rings.keys(),
            arguments.node,
            arguments.node_rank,
            self._key,
            self._sender(),
            tls=(wire.server_context(tls), wire.client_context(tls)) if tls else None,
            bytes_per_s=arguments.backup_rate,
        )
        backups.use_addresses(filter(is_elsewhere, {address_towards(arguments.controller[0])}))
        backups.start()
        return backups

    def _listen(self, addresses: set[str]) -> None:
        """Answer probes and give states on these addresses, too, as far as other nodes can reach them."""
        reachable = sorted(filter(is_elsewhere, addresses))
        if self._echo.listen(reachable):
            self._send(wire.Reachable(self._arguments.node_rank, self._echo.endpoints))
        if self._backups is not None:
            self._backups.use_addresses(reachable)

    def _send(self, message: wire.Message) -> None:
        self._client.send(message)

    def _greet(self) -> Iterator[wire.Message]:
        arguments = self._arguments
        yield wire.Hello(
            "agent",
            arguments.node,
            arguments.node_rank,
            os.getpid(),
            arguments.incarnation,
            failure_domain=arguments.failure_domain,
            launcher=max(self._parent, 0),
        )
        self._for_viewers.again()
        yield from self._obeying.again()
        yield from self._agent.again()
        yield from self._hearing.again()
        if self._backups is not None:
            yield from self._backups.again()
        if self._echo.endpoints:
            yield wire.Reachable(arguments.node_rank, self._echo.endpoints)

    def _received(self, message: wire.Message) -> None:
        handler = self._HANDLERS.get(type(message))
        if handler is not None:
            handler(self, message)

    def _profile(self, request: wire.ProfileRequest) -> None:
        self._agent.poll(time.monotonic_ns())
        self._send(self._agent.profile(request))

    def _begin_probe(self, request: wire.ProbeRequest) -> None:
        if self._probes < _MOST_PROBES:
            self._probes += 1
            self._later(self._probe(request))

    def _order_backups(self, order: wire.BackUp | wire.Located) -> None:
        if self._backups is not None:
            self._backups.received(order)

    def _doubt(self, order: wire.Doubt) -> None:
        if self._checksums is not None:
            try:
                self._checksums.doubt(Key.unpack(order.key))
            except KeepstepError as error:
                logger.error("the snapshots in which replicas differ cannot be marked: %s", error)

    def _tell_families(self, question: wire.WhichFamilies) -> None:
        if self._checksums is not None and (families := self._checksums.families(question.digest)):
            self._send(wire.Families(question.digest, families))

    def _persist(self, order: wire.Persist) -> None:
        if self._checkpoints is not None:
            self._checkpoints.order(order)
        elif order.number:
            why = "this node keeps no checkpoint in memory"
            self._send(wire.Persisting(order.number, self._arguments.node_rank, "unable", why=why))

    def _save_rings(self, order: wire.SaveRings) -> None:
        """Save rings a little later, as they are saved at the end, too, which mostly comes next after a crash."""
        if self._saving is not None:
            return

        def save() -> None:
            self._saving = None
            logger.info("%d rings saved for incident %d", self._agent.save_rings(), order.incident)

        self._saving = asyncio.get_running_loop().call_later(_SAVE_S, save)

    def _welcome(self, welcome: wire.Welcome) -> None:
        self._heartbeat_s = min(max(welcome.heartbeat_s, 0.05), 60.0)

    _HANDLERS: ClassVar[dict[type[Any], Callable[[Any, Any], None]]] = {
        wire.ProfileRequest: _profile,
        wire.StateRequest: lambda self, request: self._later(self._agent.states(request)),
        wire.ProbeRequest: _begin_probe,
        **dict.fromkeys(
            (wire.Hold, wire.RunTests, wire.Release), lambda self, order: self._agent.hold(order)
        ),
        wire.Shares: lambda self, order: self._agent.microbatches.order(order),
        **dict.fromkeys((wire.BackUp, wire.Located), _order_backups),
        wire.Doubt: _doubt,
        wire.WhichFamilies: _tell_families,
        wire.SaveRings: _save_rings,
        wire.Standing: lambda self, order: self._obeying.stand(order),
        wire.TraceRanks: lambda self, order: self._obeying.trace(order),
        wire.Persist: _persist,
        wire.Welcome: _welcome,
        wire.Refused: lambda _, refused: logger.error(
            "the controller refuses this agent: %s", refused.reason
        ),
    }

    def _later(self, answer: Coroutine[None, None, wire.Message]) -> None:
        """Send an answer that takes some time."""

        async def send() -> None:
            self._send(await answer)

        task = asyncio.create_task(send())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _probe(self, request: wire.ProbeRequest) -> wire.Probed:
        try:
            async with self._probing:
                used = self._agent.addresses()[1]
                probes = await probe_paths(request, self._arguments.node, self._key, used)
                return wire.Probed(request.request, self._arguments.node_rank, probes)
        finally:
            self._probes -= 1

    def _tick(self) -> None:
        """Poll the rings once, send a heartbeat if one is due, and schedule the next call."""
        if self._stop.is_set():
            return
        begun_s = time.monotonic()
        if os.getppid() != self._parent:
            self._stop.set()
            return
        try:
            busy = self._agent.poll(time.monotonic_ns())
            if self._agent.has_news() or begun_s >= self._next_beat_s:
                self._beat(begun_s)
            self._obeying.poll()
            for words in self._hearing.poll(begun_s):
                self._send(words)
        except Exception as error:
            self._failure = error
            self._stop.set()
            return
        self._quiet = 0 if busy else self._quiet + 1
        interval_s = self._interval_s
        if self._quiet > _QUIET_POLLS:
            interval_s = max(interval_s, _IDLE_POLL_S)
        elif not busy:  # polls of silent rings cost next to nothing, and a standstill should be noticed soon
            interval_s = _POLL_S
        if self._agent.filled > 0:
            interval_s = min(interval_s, (begun_s - self._polled_s) * _FILLED / self._agent.filled)
        self._polled_s = begun_s
        spent_s = time.monotonic() - begun_s
        asyncio.get_running_loop().call_later(max(interval_s - spent_s, 0.002), self._tick)

    def _beat(self, now_s: float) -> None:
        self._send(self._heartbeat())
        self._listen(self._agent.addresses()[0])
        if now_s >= self._next_beat_s:
            self._next_beat_s = max(self._next_beat_s + self._heartbeat_s, now_s)
        cpu_s = time.process_time()
        share = (cpu_s - self._cpu_s) / max(now_s - self._cpu_since_s, 1e-9)
        self._cpu_s, self._cpu_since_s = cpu_s, now_s
        # Polls are made less often while the agent's share of a core is above its budget, else more often again. Where
        # that is not enough, short iterations are taken together for good: single ones would make other noise.
        if share > _CPU_SHARE:
            short = self._interval_s >= _SLOW_POLL_S and self._agent.take_together()
            self._interval_s = min(self._interval_s * 1.25, _SLOWEST_POLL_S if short else _SLOW_POLL_S)
        elif share < 0.7 * _CPU_SHARE:
            self._interval_s = max(self._interval_s / 1.1, _POLL_S)

    def _heartbeat(self) -> wire.Heartbeat:
        return self._for_viewers.added(self._agent.heartbeat(time.monotonic_ns()))

    def _orphaned(self) -> bool:
        return os.getppid() != self._parent or self._launcher is None or not alive(self._launcher)

    async def _end(self) -> None:
        self._gpus.close()
        self._ports.close()
        if self._checksums is not None:
            self._checksums.stop()
        if self._checkpoints is not None:
            await asyncio.to_thread(self._checkpoints.stop)
        if self._backups is not None:
            self._backups.stop()
        self._echo.close()
        orphaned = self._orphaned()
        if not orphaned:
            # The signal of the launcher's death may come a moment before /proc shows that it is dead.
            await asyncio.sleep(_DYING_S)
            orphaned = self._orphaned()
        if orphaned:
            logger.warning("the launcher (process %d) is gone: ending its workers", self._parent)
            killed = kill_carriers(
                {
                    "KEEPSTEP_RING": frozenset(self._arguments.rings.values()),
                    "KEEPSTEP_RUN_DIR": frozenset({str(self._arguments.run_dir)}),
                }
            )
            logger.warning("%d processes killed", killed)
        self._agent.poll(time.monotonic_ns())
        if self._saving is not None:
            self._saving.cancel()
        logger.info("%d rings saved", self._agent.save_rings())
        self._send(self._heartbeat())
        for words in self._hearing.end(time.monotonic()):
            self._send(words)
        self._send(wire.Bye("the launcher is gone" if orphaned else "told to end", orphaned))
        await self._client.drained(0.5)
        await self._client.close()
        self._agent.close()


def serve(arguments: Arguments) -> int:
    """Run the agent and return its exit code. The launcher's death ends it, even right at the start."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    # The launcher may have died before this process asked for a signal: the rings are reached through its /proc.
    makers = {path.split("/")[2] for path in arguments.rings.values() if path.startswith("/proc/")}
    if not all(os.path.exists(f"/proc/{maker}") for maker in makers):
        parent = -1
    folder = arguments.run_dir / "nodes" / str(arguments.node_rank)
    log_into(folder / "agent.log", "%(asctime)s %(process)d %(levelname)s %(message)s")
    logger.info(
        "agent of node %d (%s), ranks %s", arguments.node_rank, arguments.node, sorted(arguments.rings)
    )

    async def main() -> None:
        await Program(arguments, parent).main()

    try:
        wire.run(main())
    except Exception:
        logger.exception("the agent ends")
        return 1
    return 0
