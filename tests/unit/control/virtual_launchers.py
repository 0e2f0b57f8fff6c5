"""A job of several nodes in virtual time: the controller's core and the launchers' memberships over a bad network.

Virtual are processes, connections and time. Launchers do with their workers what ``keepstep.launch.launcher`` does.
What must hold is in ``virtual_checks.py``, what goes wrong in ``virtual_faults.py``.
"""

from __future__ import annotations

import errno
import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from tests.unit.control import control_stand_ins as stand_ins
from tests.unit.control.virtual_checks import check, check_end, check_given, check_start, describe
from tests.unit.control.virtual_elections import ELECTOR_S, elect
from tests.unit.control.virtual_job import JobState
from tests.unit.control.virtual_parts import ATTEMPT_S, RANKS, Connection, Host, Site

from keepstep import wire
from keepstep.control.controller import Controller
from keepstep.control.effects import (
    Effect,
    Reach,
    Send,
    StoreCouncil,
    StorePlacement,
    StoreStop,
    Tell,
    WriteIncident,
)
from keepstep.control.settings import Settings
from keepstep.launch.controller.lease import Elector
from keepstep.launch.controller.member import LEASE_S, Member

TICK_S = 0.4
BEAT_S = 1.4
FINISHED_S = 60.0


class Job(JobState):
    """One that nothing happens to but the network's delays: see `virtual_faults.World`.

    In most jobs the controller can move; in the others it runs on a host of its own that nothing happens to.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        dice = self.random
        self.hosts = [self._host(f"gpu-{n}", 100 + n) for n in range(self.nodes + self.spares)]
        self.head = self.hosts[0] if self.elects else self._host("head", 99)
        self.start_site(self.head, 1)
        for host in self.hosts:
            self.at(dice.uniform(0, 0.5), lambda host=host: self.connect(host))
        self.end_s = dice.uniform(15, 60)

    # --- running ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while self.events and self.now_s < 400.0 and not self._done():
            self.now_s, _, event = heapq.heappop(self.events)
            event()
            check(self)
        living = [host for host in self.hosts if host.alive]
        assert all(host.exit_code is not None for host in living), f"never ended: {describe(self)}"
        check_end(self, living)

    def _done(self) -> bool:
        return all(not host.alive or host.exit_code is not None for host in self.hosts)

    # --- the controller --------------------------------------------------------------------------------------------

    def start_site(self, host: Host, term: int) -> None:
        site = Site(
            host, term, Controller(Settings()), council=host.elector.inheritance if term > 1 else None
        )
        site.controller = self._fresh(site)
        host.site = site
        self.disturbances += host.deaf  # it cannot reach this one, either
        self._is_back()
        host.elector.serves(term)
        self._tick(site)

    def _is_back(self) -> None:
        """A controller: to it come whom there was none to come to when they were no longer cut off."""
        self.back_s = self.now_s
        for host in self.hosts:
            if host.unled:
                host.healed_s, host.unled = self.now_s, False

    def _fresh(self, site: Site) -> Controller:
        settings = replace(SETTINGS_OF[self.nodes], shrink_s=self.shrink_s)
        if self.elects:
            settings = replace(settings, seat=site.host.elector.seat.token, term=site.term)
        controller = Controller(settings, locators=stand_ins.PlainLocators(), unix_s=lambda now_s: now_s)
        controller.councils.port = site.term
        controller.restore(
            site.written.values(),  # type: ignore[arg-type]
            site.stored.placements if site.stored else (),
            site.stopped,
            site.council,
        )
        return controller

    def _tick(self, site: Site) -> None:
        if site.over or not site.host.alive:
            return
        if site.up and self.now_s >= site.stalled_until_s:
            self._carry_out(site, site.controller.tick(self.now_s))
        self.at(TICK_S, lambda: self._tick(site))

    def _carry_out(self, site: Site, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                if isinstance(effect.message, wire.Placement):
                    check_given(self, site, effect.message)
                if isinstance(effect.message, wire.Seal) and effect.message.alike:
                    self.seals.add((site.term, effect.message.incarnation))
                for peer in effect.peers:
                    if peer in site.peers:
                        self._send(site.peers[peer], effect.message)
            elif isinstance(effect, Reach):
                self._reach(site, effect)
            elif isinstance(effect, StorePlacement):
                site.stored = effect
            elif isinstance(effect, StoreStop):
                site.stopped = effect.stop
            elif isinstance(effect, StoreCouncil):
                site.council = effect.council
            elif isinstance(effect, WriteIncident):
                site.written[effect.incident.number] = effect.incident
            elif isinstance(effect, Tell):
                self.told.append(effect.text)

    def _reach(self, site: Site, effect: Reach) -> None:
        """The controller tries it until it is reached, or has gone."""
        controller, connection = site.controller, site.peers.get(effect.peer)
        if connection is None:
            return

        def attempt() -> None:
            if site.controller is not controller or site.peers.get(effect.peer) is not connection:
                return
            there = site.host.alive and connection.host.alive and connection.host.reaches(site)
            if self.now_s < site.stalled_until_s or not there:
                self.at(1.0, attempt)
            else:
                self._carry_out(site, controller.reached(effect.peer))

        self.at(self.delay_s(), attempt)

    def _send(self, connection: Connection, message: wire.Message) -> None:
        if connection.up and connection.there:
            if not connection.to_node:
                self.at(self.delay_s(), lambda: self._read(connection))
            connection.to_node.append(message)

    def delay_s(self) -> float:
        return self.random.choice((0.001, 0.01, 0.05, 0.3, 0.8))

    def _deliver(self, connection: Connection) -> None:
        """What waits is read by the controller, at once."""
        site = connection.site
        if self.now_s < site.stalled_until_s:
            self.at(self._awake_s(site), lambda: self._deliver(connection))
            return
        while connection.to_controller and connection.number in site.peers:
            message = connection.to_controller.popleft()
            self._carry_out(site, site.controller.message(connection.number, message, self.now_s))

    def _awake_s(self, site: Site) -> float:
        """Until the controller that sleeps reads; a tick may come before."""
        return site.stalled_until_s - self.now_s + self.random.uniform(0, 0.8)

    def _closed_there(self, connection: Connection) -> None:
        site = connection.site
        if self.now_s < site.stalled_until_s:
            self.at(self._awake_s(site), lambda: self._closed_there(connection))
            return
        self._deliver(connection)
        connection.there = False
        if site.peers.pop(connection.number, None) is not None:
            self._carry_out(site, site.controller.disconnected(connection.number, self.now_s))

    # --- launchers -------------------------------------------------------------------------------------------------

    def _host(self, name: str, pid: int) -> Host:
        number = pid % 100
        seat = wire.Seat(self.random.randrange(1, 1 << 62), name, pid, f"10.0.0.{number}", 7000)
        join = wire.Join(
            *(name, f"10.0.0.{number}", RANKS, 29500, -1, self.least, self.nodes, self.max_restarts),
            hosts_controller=self.elects and pid == 100,
        )
        part = Member(join, pid, lambda: self.random.randrange(20000, 60000))
        host = Host(name, pid, part, Elector(seat, self.random.random))
        host.elector.learned(wire.Leads(1, "10.0.0.0", 1))
        self.at(BEAT_S, lambda: self._beat(host))
        if self.elects:
            part.vote(seat, host.elector)
            self.at(self.random.uniform(0, ELECTOR_S), lambda: elect(self, host))
        return host

    def target(self, host: Host) -> Site | None:
        """The controller that it connects to."""
        if not self.elects:
            return self.head.site
        leader = host.elector.leader
        found = next((h for h in reversed(self.hosts) if h.elector.seat.address == leader.address), None)
        site = found.site if found is not None and found.alive else None
        return site if site is not None and site.term == leader.port else None

    def connect(self, host: Host) -> None:
        if not host.alive or host.exit_code is not None or host.connection is not None:
            return
        site = self.target(host)
        gone = site is None and (host.cut or self._is_dead(host.elector.leader.address))
        if gone or (site is not None and not host.reaches(site)):
            host.part.trouble(OSError(errno.ETIMEDOUT, "timed out"), self.now_s)
            self.at(ATTEMPT_S, lambda: self.connect(host))
            self._consider(host)
            return
        if site is None or not site.up:
            host.part.trouble(ConnectionRefusedError(errno.ECONNREFUSED, "refused"), self.now_s)
            host.failures += 1
            self.at(
                min(5.0, 0.05 * 2**host.failures) * self.random.uniform(0.5, 1), lambda: self.connect(host)
            )
            self._consider(host)
            return
        host.failures = 0
        host.connection = self._open("launcher", host, site)
        if not self.elects:
            host.part.connected()
        queued, host.queue = host.queue, []
        self._say(host, [*host.part.greet(), *queued])

    def _is_dead(self, address: str) -> bool:
        return not any(h.alive for h in self.hosts if h.elector.seat.address == address)

    def _open(self, role: str, host: Host, site: Site) -> Connection:
        self.count += 1
        connection = Connection(self.count, role, host, site)
        site.peers[connection.number] = connection
        site.controller.connected(connection.number, role)
        return connection

    def _say(self, host: Host, messages: list[wire.Message]) -> None:
        connection = host.connection
        if connection is None:
            host.queue += messages
        elif messages:
            self._put(connection, messages)

    def _put(self, connection: Connection, messages: list[wire.Message]) -> None:
        if connection.up:
            if not connection.to_controller:
                self.at(self.delay_s(), lambda: self._deliver(connection))
            connection.to_controller += messages

    def _read(self, connection: Connection) -> None:
        """All that has come is read in one batch; only then the launcher does something about it."""
        host = connection.host
        if connection.number not in connection.site.peers or not connection.here:
            return
        if not host.alive or not connection.up:
            return
        messages, connection.to_node = connection.to_node, deque()
        if connection.role == "launcher":
            for message in messages:
                self._say(host, host.part.received(message))
                if self.elects and isinstance(message, wire.Welcome) and not host.part.is_void:
                    host.part.connected()
                if isinstance(message, wire.Council) and not host.part.is_void:
                    kept = host.elector.received(message, self.now_s)
                    self._say(host, [kept] if kept is not None else [])
            self._consider(host)
            if host.part.is_void:
                self.break_connection(connection, host)

    def break_connection(self, connection: Connection, host: Host, after_s: float = 0.0) -> None:
        """The connection breaks; each side notices for itself. What is under way is lost."""
        if not connection.up:
            return
        connection.up = False
        if self.random.random() < 0.5:
            connection.to_controller.clear()
        self.at(after_s + self.random.uniform(0, 0.1), lambda: self._closed_there(connection))
        self.at(after_s + self.random.uniform(0, 0.1), lambda: self._closed_here(connection, host))

    def _closed_here(self, connection: Connection, host: Host) -> None:
        connection.here = False
        if host.agent is connection:
            host.agent = None
        if host.connection is connection:
            host.connection = None
            host.part.disconnected(self.now_s)
            self.at(0.05, lambda: self.connect(host))

    def _consider(self, host: Host) -> None:
        """What a launcher does whenever something has changed."""
        if not host.alive or host.exit_code is not None or host.ending:
            return
        part = host.part
        if part.seal is not None:
            seal, part.seal = part.seal, None
            self.at(self.random.choice((0.1, 1.0, 5.0)), lambda: self._seal(host, seal.incarnation))
        if part.stop is not None:
            self._end_workers(host, lambda: self._exit(host, part.stop.exit_code if part.placement else 0))  # type: ignore[union-attr]
        elif part.refusal:
            host.exit_code = 2
        elif host.finished and host.running >= 0 and part.away_s(self.now_s) > FINISHED_S:
            host.by_itself = True
            self._exit(host, 0)
        elif host.running >= 0 and not host.finished and part.is_cut_off(self.now_s):
            host.by_itself = True
            self._end_workers(host, lambda: self._halted(host))
        elif part.must_halt:
            self._end_workers(host, lambda: self._halted(host))
        elif part.away_s(self.now_s) > 2 * LEASE_S and host.running < 0:
            host.by_itself = True
            self.disturbances += 1  # it has waited for as long as it does, and is missed now
            self._exit(host, 1)
        elif (placement := part.to_run) is not None:
            part.started()
            self._begins(host, placement)
            host.running, host.healthy, host.finished, host.by_itself = (
                placement.incarnation,
                True,
                False,
                False,
            )
            self.at(
                max(self.end_s - self.now_s, 0) + self.random.uniform(1.0, 3.0),
                lambda: self._finish(host, placement.incarnation),
            )
            self._agent(host)

    def _begins(self, host: Host, placement: wire.Placement) -> None:
        check_start(self, host, placement)
        if placement.incarnation > self.newest:
            grown = placement.node_count > self.sizes.get(self.newest, placement.node_count)
            if grown and self.dice.random() < 0.4:
                self.at(self.dice.uniform(0.1, 1.0), self.fail)  # before it has trained with the newcomers
            self.newest, self.newest_s = placement.incarnation, self.now_s
            self.pauses = placement.pauses

    def _seal(self, host: Host, incarnation: int) -> None:
        if host.alive and host.running == incarnation and not host.ending:
            self._say(host, [wire.Sealed(incarnation, *((-1, self.rigid) if self.rigid else (7, "")))])

    def _end_workers(self, host: Host, then: Callable[[], None]) -> None:
        host.ending = True

        def ended() -> None:
            host.ending = False
            host.running = -1
            if host.alive:
                if host.agent is not None:
                    self.break_connection(host.agent, host)
                then()
                self._consider(host)

        self.at(self.random.choice((0.0, 0.1, 0.5, 2.0, 6.0)), ended)

    def _halted(self, host: Host, unfit: str = "") -> None:
        self._say(host, host.part.halted(unfit, self.rigid))

    def _exit(self, host: Host, code: int) -> None:
        if host.exit_code is None:
            host.exit_code = code
            replaced = 0 < host.elector.leads < max(self.leaders)  # and nobody was left to tell it so
            host.by_itself = host.by_itself or host.cut or replaced
            self._say(host, host.part.ended(code, "ends"))
            if host.connection is not None:
                self.at(0.5, lambda connection=host.connection: self.break_connection(connection, host))
            if host.part.stop is None:  # what the end is, its controller goes on telling
                self.at(0.5, lambda: self.end_site(host, 0.0))

    def _finish(self, host: Host, incarnation: int) -> None:
        if any((incarnation, node_rank) not in self.played for node_rank in range(self.sizes[incarnation])):
            self.at(1.0, lambda: self._finish(host, incarnation))  # nobody trains before all do
        elif host.alive and host.running == incarnation and host.healthy and not host.ending:
            host.finished = True
            host.healthy = False
            self._say(host, host.part.ended(0, "finished"))

    def _agent(self, host: Host) -> None:
        if not host.alive or host.running < 0 or host.agent is not None or host.exit_code is not None:
            return
        site = self.target(host)
        if site is None or not site.up or not host.reaches(site):
            self.at(1.0, lambda: self._agent(host))
            return
        placement = host.part.placement
        assert placement is not None
        host.agent = self._open("agent", host, site)
        who = (host.name, placement.node_rank, host.pid + 5000, placement.incarnation)
        hello = wire.Hello("agent", *who, launcher=host.pid)
        self._put(host.agent, [hello])

    def _beat(self, host: Host) -> None:
        if not host.alive or host.exit_code is not None:
            return
        placement = host.part.placement
        if host.agent is not None and placement is not None and host.running >= 0:
            ranks = tuple(wire.RankBeat(placement.first_rank + n, 5, 2, 10, 0.5) for n in range(RANKS))
            self._put(host.agent, [wire.Heartbeat(placement.node_rank, 1, self.now_s, ranks)])
        elif host.running >= 0 and self.random.random() < 0.3:  # it is as slow to come back as its launcher
            self._agent(host)
        if host.part.away_s(self.now_s):
            self._consider(host)
        self.at(BEAT_S, lambda: self._beat(host))


SETTINGS_OF = {
    nodes: Settings(nodes=nodes, backups=1, halt_s=20.0, join_s=25.0, grace_s=0.5, last_call_s=1.0)
    for nodes in (2, 3, 4, 5, 12)
}
