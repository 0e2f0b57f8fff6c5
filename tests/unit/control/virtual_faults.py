"""What goes wrong in a virtual job: nodes, launchers, controllers and connections are lost, and operators interfere."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.control.virtual_launchers import Job
from tests.unit.control.virtual_parts import DEAD_HOST_S, Host, Site

from keepstep import wire
from keepstep.control.membership.rendezvous import Launcher
from keepstep.core.exit_codes import STOPPED_BY_HAND
from keepstep.core.finding import Finding


class World(Job):
    """``World(seed).run()`` plays one job. ``faults`` limits what may happen (names of ``_FAULTS``)."""

    def __init__(self, seed: int, faults: frozenset[str] | None = None) -> None:
        super().__init__(seed)
        chosen = sorted(_FAULTS if faults is None else faults)
        if self.least < self.nodes and {"lose", "come"} <= set(chosen):
            self.end_s = max(self.end_s, self.dice.uniform(40, 120))
            for fault in (self.lose, self.come):
                for _ in range(self.dice.choice((0, 1, 1, 2))):
                    self.at(self.dice.uniform(5, 60), fault)
        for _ in range(self.random.choice((0, 1, 1, 2, 3, 5, 8)) if chosen else 0):
            when_s = self.random.uniform(1.0, self.end_s)
            for _ in range(
                self.random.choice((1, 1, 2))
            ):  # one comes alone, or with another one on its heels
                fault = _FAULTS[
                    self.random.choice([*chosen, *(name for name in ("fail", "lose") if name in chosen)])
                ]
                self.at(when_s + self.random.uniform(0, 2), lambda fault=fault: fault(self))

    def _one(self, condition: Callable[[Host], bool]) -> Host | None:
        found = [h for h in self.hosts if h.alive and h.exit_code is None and condition(h)]
        return self.random.choice(found) if found else None

    def fail(self) -> None:
        """Workers of a node, or of two at once, fail."""
        code = self.random.choice((1, 137, 139))
        for _ in range(self.random.choice((1, 1, 2))):
            host = self._one(lambda h: h.running >= 0 and h.healthy and not h.ending)
            if host is None:
                return
            host.healthy = False
            self.disturbances += 1
            self.codes.add(code)
            placement = host.part.placement
            assert placement is not None
            finding = Finding("crash", placement.first_rank, host.name, self.now_s, -1, exit_code=code)
            self._say(host, [*host.part.found(finding), *host.part.failed(code, "rank died")])
            unfit = self.random.choice(("", "", "disk full"))
            self._end_workers(host, lambda host=host, unfit=unfit: self._halted(host, unfit))

    def lose(self) -> None:
        """A node goes down: connections end at once, or when the kernel notices."""
        self._lose(self._one(lambda h: h.site is None))

    def lose_leader(self) -> None:
        """The same of the controller's."""
        self._lose(self._one(lambda h: h.elector.leads > 0))

    def _lose(self, host: Host | None) -> None:
        if host is not None:
            self.disturbances += 1
            host.alive, host.running = False, -1
            self.end_site(host, self.random.choice((0.0, DEAD_HOST_S)))
            after_s = self.random.choice((0.0, DEAD_HOST_S))
            for connection in (host.connection, host.agent):
                if connection is not None:
                    self.break_connection(connection, host, after_s)

    def kill_launcher(self) -> None:
        """A launcher is killed; its agent says farewell, and workers end with it. It may be started anew."""
        self._kill_launcher(self._one(lambda h: h.site is None))

    def kill_leader(self) -> None:
        """The same of the controller's."""
        self._kill_launcher(self._one(lambda h: h.elector.leads > 0))

    def _kill_launcher(self, host: Host | None) -> None:
        if host is None:
            return
        self.disturbances += 1
        host.alive, host.running = False, -1
        self.end_site(host, 0.0)
        if host.connection is not None:
            self.break_connection(host.connection, host)
        if host.agent is not None:
            agent = host.agent
            self._put(agent, [wire.Bye("the launcher is gone", orphaned=True)])
            self.at(1.0, lambda: self.break_connection(agent, host))
        if self.random.random() < 0.5:
            self.at(self.random.uniform(0.5, 10), lambda: self._again(host))

    def _again(self, host: Host) -> None:
        self._begin(self._host(host.name, host.pid + 1000))

    def _begin(self, fresh: Host) -> None:
        """It finds the controller in the run's folder."""
        fresh.elector.learned(max((h.elector.leader for h in self.hosts), key=lambda leads: leads.term))
        self.hosts.append(fresh)
        if self.elects:
            fresh.part.disconnected(self.now_s)
        self.connect(fresh)

    def cut(self) -> None:
        """A node is cut off, for a moment or for longer."""
        self._cut(self._one(lambda h: h.site is None and not h.cut))

    def cut_leader(self) -> None:
        """The same of the controller's."""
        self._cut(self._one(lambda h: h.elector.leads > 0 and not h.cut))

    def _cut(self, host: Host | None) -> None:
        if host is None:
            return
        self.disturbances += 1
        host.cut, host.cut_s = True, self.now_s
        for connection in (host.connection, host.agent):
            if connection is not None and connection.site is not host.site:
                self.break_connection(connection, host, DEAD_HOST_S)
        for connection in list(host.site.peers.values()) if host.site is not None else ():
            if connection.host is not host:
                self.break_connection(connection, connection.host, DEAD_HOST_S)
        self.at(self.random.choice((1.0, 5.0, 20.0, 60.0, 200.0)), lambda: self._heal(host))

    def _heal(self, host: Host) -> None:
        """All others were as cut off from a leader as it was from them."""
        host.cut = False
        for one in self.hosts if host.site is not None else (host,):
            one.healed_s, one.unled = self.now_s, self.leader() is None

    def deafen(self) -> None:
        """A launcher and its agent do not reach the controller beside them, for a moment or for longer."""
        host = self._one(lambda h: h.elector.leads > 0 and not h.deaf)
        if host is None or host.site is None:
            return
        self.disturbances += 1
        host.deaf, host.cut_s = True, self.now_s
        after_s = self.random.choice((0.0, DEAD_HOST_S))
        for connection in (host.connection, host.agent):
            if connection is not None and connection.site is host.site:
                self.break_connection(connection, host, after_s)
        self.at(self.random.choice((1.0, 5.0, 20.0, 60.0, 200.0)), lambda: self._hear(host))

    def _hear(self, host: Host) -> None:
        host.deaf, host.healed_s, host.unled = False, self.now_s, self.leader() is None

    def drop(self) -> None:
        """A connection breaks."""
        host = self._one(lambda h: h.connection is not None)
        if host is not None and host.connection is not None:
            self.break_connection(host.connection, host)

    def drop_all(self) -> None:
        """All connections break."""
        for connection in [one for site in self.sites for one in site.peers.values()]:
            self.break_connection(connection, connection.host)

    def stall(self) -> None:
        """The controller sleeps."""
        site = self.leader()
        if site is not None and self.now_s >= site.stalled_until_s:
            site.stalled_until_s = self.now_s + self.random.choice((1.5, 4.0, 8.0, 15.0))

    def kill_controller(self) -> None:
        """The controller dies, and comes back."""
        site = self.leader()
        if site is None:
            return
        self.kill_site(site)

        def back() -> None:
            if site.over or not site.host.alive:
                return
            site.up = True
            self._is_back()
            site.controller = self._fresh(site)

        self.at(self.random.choice((0.3, 1.0, 4.0, 40.0)), back)

    def give_up(self) -> None:
        """The controller cannot be kept running where it is."""
        site = self.leader()
        if site is not None and site.host.elector.council is not None:
            self.kill_site(site)
            site.host.elector.resign(self.now_s)

    def kill_site(self, site: Site) -> None:
        site.up = False
        for connection in site.peers.values():
            connection.up = connection.there = False
            self.at(self.random.uniform(0, 0.05), lambda c=connection: self._closed_here(c, c.host))
        site.peers.clear()

    def end_site(self, host: Host, after_s: float) -> None:
        """It ends with its host; the others notice later."""
        if host.site is None:
            return
        host.site.up, host.site.over = False, True
        for connection in host.site.peers.values():
            connection.up = connection.there = False
            self.at(after_s + 0.05, lambda c=connection: self._closed_here(c, c.host))
        host.site.peers.clear()

    def leave_spare(self) -> None:
        """Ctrl-C for a spare."""
        host = self._one(lambda h: h.part.placement is None and h.part.is_spare and not h.ending)
        if host is not None:
            site = self.leader()  # it may have been given a place just now
            placed = (
                site is not None and Launcher(host.name, host.pid) in site.controller.rendezvous.placements
            )
            self.disturbances += site is None or placed or site.controller.reforming.under_way
            self._exit(host, 130)

    def operate(self) -> None:
        """An operator has the job begin again, also with nodes exchanged or replaced, suspends or ends it."""
        verb = self.random.choice(("restart", *["exchange"] * 2, *["replace"] * 2, *["suspend"] * 3, "stop"))
        self._order(verb)
        if verb == "suspend":
            self.at(self.random.choice((0.0, 1.0, 5.0, 20.0)), self._resume)

    def _order(self, verb: str) -> None:
        site = self.leader()
        if site is None:
            return
        self.disturbances += 1
        self.orders += 1
        self.codes |= {STOPPED_BY_HAND} if verb == "stop" else set()
        self.count += 1
        site.controller.connected(self.count, "client")
        names = sorted(one.node for one in site.controller.rendezvous.placements)
        count = min({"exchange": 2, "replace": 1}.get(verb, 0), len(names))
        nodes = tuple(self.random.sample(names, count))
        for message in (wire.Hello("client", "desk", -1, 1), wire.Operate(verb, True, nodes)):  # type: ignore[arg-type]
            self._carry_out(site, site.controller.message(self.count, message, self.now_s))

    def _resume(self) -> None:
        """Until it has gone on: the order may find nobody, or the job not suspended yet."""
        site = self.leader()
        if site is not None and site.controller.reforming.suspended:
            self._order("resume")
        if not self._done():
            self.at(3.0, self._resume)

    def come(self) -> None:
        """Another launcher comes."""
        self._begin(self._host(f"gpu-{len(self.hosts)}", 100 + len(self.hosts)))


_FAULTS: dict[str, Callable[[World], None]] = {
    "fail": World.fail,
    "lose": World.lose,
    "kill_launcher": World.kill_launcher,
    "cut": World.cut,
    "drop": World.drop,
    "drop_all": World.drop_all,
    "stall": World.stall,
    "kill_controller": World.kill_controller,
    "give_up": World.give_up,
    "lose_leader": World.lose_leader,
    "kill_leader": World.kill_leader,
    "cut_leader": World.cut_leader,
    "deafen": World.deafen,
    "leave_spare": World.leave_spare,
    "come": World.come,
    "operate": World.operate,
}
HARMLESS = frozenset({"drop", "drop_all", "stall", "kill_controller", "leave_spare", "come"})
