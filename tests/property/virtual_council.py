"""Electors and leaders alone, in virtual time, over a network that loses, repeats, delays and reorders everything.

Harsher than a job: councils and the answers to them are datagrams here too. The rank table is a number that no
two tables share. `Assembly.check` holds after every event.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

from keepstep import wire
from keepstep.control.membership.council import Councils
from keepstep.control.membership.rendezvous import Launcher
from keepstep.launch.controller.lease import TTL_S, Elector

TICK_S = 0.4


@dataclass(eq=False)
class Member:
    """A launcher. ``leader`` runs beside it while its elector leads."""

    launcher: Launcher
    elector: Elector
    side: int = 0  # of a partition
    alive: bool = True
    deaf: bool = False  # does not reach the leader beside it
    slept_until_s: float = 0.0
    leader: Councils | None = None
    stored: wire.Council | None = None
    table: int = -1  # that the leader wishes for

    def reaches(self, other: Member) -> bool:
        """Whether there is a way from this launcher to what runs beside the other."""
        return not self.deaf if other is self else other.side == self.side


class Assembly:
    """``Assembly(seed).run()`` plays some minutes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.loss = self.random.choice((0.0, 0.05, 0.3))
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.names = self.tables = 0
        self.tokens: set[int] = set()
        self.allowed: dict[int, int] = {}  # table by incarnation, once anybody might have been placed by it
        self.leaders: dict[int, Member] = {}
        self.settled = 0
        self.members = [self._member(f"gpu-{n}") for n in range(self.random.choice((2, 3, 3, 4, 5, 8)))]
        self.players = self.random.choice((2, 3, 5))  # the others are spares
        self._lead(self.members[0], 1)
        for _ in range(self.random.choice((4, 12, 30))):
            fault = self.random.choice(_FAULTS)
            self.at(self.random.uniform(1, 100), lambda fault=fault: fault(self))

    def run(self) -> None:
        while self.events and self.now_s < 120:
            self.now_s, _, event = heapq.heappop(self.events)
            event()
            self.check()

    def check(self) -> None:
        acting = [one.launcher.node for one in self.members if one.alive and one.elector.may_act(self.now_s)]
        assert len(acting) <= 1, f"{acting} have the lease"
        for one in self.members:
            elector, leader = one.elector, one.leader
            if elector.leads:
                other = self.leaders.setdefault(elector.leads, one)
                assert other is one, f"two lead term {elector.leads}"
            if leader is None or not one.alive or leader.newest is None:
                continue
            council = leader.newest
            for seats in (council.seats, council.former):
                tokens = {seat.token for seat in seats}
                assert len(tokens) == len(seats), f"two seats of one launcher: {seats}"
                assert tokens <= self.tokens, f"seats of nobody: {seats}"
            incarnation, table = _table(council)
            if leader.allows(incarnation):
                known = self.allowed.setdefault(incarnation, table)
                assert known == table, f"two tables of incarnation {incarnation}: {known}, {table}"
                assert incarnation == max(self.allowed) or self._is_over(one), (
                    f"incarnation {max(self.allowed)} is forgotten in term {leader.term}"
                )
                self.settled = max(self.settled, incarnation)

    def _is_over(self, one: Member) -> bool:
        """A later leader has gone on."""
        assert one.leader is not None
        return max(self.leaders, default=0) > one.leader.term

    def at(self, after_s: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now_s + after_s, self.count, event))

    def _send(self, here: Member, there: Member, arrived: Callable[[], None]) -> None:
        def deliver() -> None:
            if there.alive and (here is there or here.side == there.side):
                if self.now_s < there.slept_until_s:
                    self.at(there.slept_until_s - self.now_s, deliver)
                else:
                    arrived()

        copies = 1 if here is there else self.random.choice((1, 1, 1, 1, 2))
        for _ in range(copies):
            if here is there or self.random.random() >= self.loss:
                self.at(
                    self.random.choice((0.001, 0.02, 0.3, 2.0, 6.0)) if here is not there else 0.001, deliver
                )

    # Launchers.

    def _member(self, name: str) -> Member:
        self.names += 1
        seat = wire.Seat(self.random.randrange(1, 1 << 60), name, self.names, name, 7000)
        one = Member(Launcher(name, self.names), Elector(seat, self.random.random))
        self.tokens.add(seat.token)
        self.at(self.random.uniform(0, TICK_S), lambda: self._tick(one))
        return one

    def _find(self, seat: wire.Seat) -> Member | None:
        """Whoever listens at the address."""
        return next((m for m in reversed(self.members) if m.elector.seat.address == seat.address), None)

    def _tick(self, one: Member) -> None:
        if not one.alive:
            return
        self.at(TICK_S, lambda: self._tick(one))
        if self.now_s < one.slept_until_s:
            return
        connected = (self.random.random() < 0.1 and not one.deaf) or self._is_led(one)
        for seat, ask in one.elector.tick(self.now_s, connected=connected):
            other = self._find(seat)
            if other is not None:
                self._send(one, other, lambda other=other, ask=ask: self._asked(other, one, ask))
        if (
            one.leader is not None
            and one.elector.leads != one.leader.term
            and one.elector.council is not None
        ):
            one.leader = None
        if one.elector.leads and one.leader is None and self.random.random() < 0.5:
            one.stored = one.elector.council
            self._lead(one, one.elector.leads)
        if one.leader is not None:
            self._govern(one, one.leader)

    def _is_led(self, one: Member) -> bool:
        return any(m.leader and m.alive and one.reaches(m) and m.elector.leads for m in self.members)

    def _asked(self, asked: Member, by: Member, ask: wire.Ask) -> None:
        answer = asked.elector.asked(ask, self.now_s)
        if answer is not None:
            self._send(asked, by, lambda: by.elector.answered(answer, self.now_s))

    # Leaders.

    def _lead(self, one: Member, term: int) -> None:
        one.leader = Councils(one.elector.seat.token, term, term)
        one.elector.serves(term)
        if one.stored is not None:
            one.leader.restore(one.stored)
        one.table = -1

    def _govern(self, one: Member, leader: Councils) -> None:
        """Its connections, the table it wishes for, and what it says."""
        for other in self.members:
            joined = other.launcher in _joined(leader) and other.launcher not in leader.electors.away
            reached = other.alive and other.reaches(one)
            if reached and not joined:
                leader.here(other.launcher, other.elector.seat)
            elif joined and not reached and self.random.random() < 0.3:
                leader.electors.gone(other.launcher, self.now_s)
        newest = leader.newest
        incarnation, table = _table(newest) if newest is not None else (-1, -1)
        again = newest is None or (leader.allows(incarnation) and self.random.random() < 0.1)
        if again and leader.is_settled:
            self.tables += 1
            one.table, incarnation = self.tables, incarnation + 1
        else:  # what was wished for without having been proposed is forgotten
            one.table = table
        rows = self._rows(leader, incarnation, one.table)
        for launcher, _ in leader.electors.to_reach(rows):
            after_s = self.random.choice((0.0, 0.0, 0.02, 0.3))
            if after_s:
                self.at(after_s, lambda launcher=launcher: leader.electors.reached(launcher))
            else:
                leader.electors.reached(launcher)
        council = leader.tick(rows, self.now_s)
        if council is not None:
            one.stored = council
        if council is not None or self.random.random() < 0.3:  # those that come back are told again
            for other in _joined(leader):
                self._tell(one, leader, other)

    def _rows(self, leader: Councils, incarnation: int, table: int) -> dict[Launcher, wire.Placement]:
        joined = [one.launcher for one in self.members if one.alive and one.launcher in _joined(leader)]
        players = joined[: self.players]
        count = max(len(players), 1)
        return {
            one: wire.Placement(n, n, count, count, "10.0.0.0", table, incarnation)
            for n, one in enumerate(players)
        }

    def _tell(self, one: Member, leader: Councils, to: Launcher) -> None:
        other = next((m for m in self.members if m.launcher == to), None)
        council = leader.told(to)
        if other is None or council is None or (other is one and one.deaf):
            return

        def arrived() -> None:
            kept = other.elector.received(council, self.now_s)
            if kept is not None:
                self._send(other, one, lambda: answered(kept))

        def answered(kept: wire.Kept) -> None:
            if one.leader is not None:
                one.leader.kept(to, kept)

        self._send(one, other, arrived)

    # Faults.

    def kill(self) -> None:
        """A launcher, and perhaps another one comes at its address."""
        one = self.random.choice(self.members)
        one.alive, one.leader, one.elector.leads = False, None, 0
        if self.random.random() < 0.7:
            self.members.append(self._member(one.elector.seat.address))

    def part(self) -> None:
        """The network falls into two."""
        for one in self.members:
            one.side = self.random.choice((0, 0, 1))

    def join(self) -> None:
        """It is whole again."""
        for one in self.members:
            one.side = 0

    def sleep(self) -> None:
        """A launcher and what is beside it stand still."""
        self.random.choice(self.members).slept_until_s = self.now_s + TTL_S * self.random.uniform(0.2, 4)

    def deafen(self) -> None:
        """A launcher does not reach the leader beside it, for a moment or for longer."""
        one = self.random.choice([member for member in self.members if member.leader] or self.members)
        one.deaf = True
        self.at(self.random.choice((1.0, 6.0, 15.0, 40.0)), lambda: self._hear(one))

    def _hear(self, one: Member) -> None:
        one.deaf = False

    def restart(self) -> None:
        """A controller dies, and is started again."""
        one = self.random.choice(self.members)
        if one.leader is not None and one.alive:
            self._lead(one, one.leader.term)

    def resign(self) -> None:
        """A launcher gives up its controller."""
        one = self.random.choice(self.members)
        if one.elector.council is not None:
            one.elector.resign(self.now_s)


_FAULTS = (
    Assembly.kill,
    Assembly.part,
    Assembly.join,
    Assembly.join,
    Assembly.sleep,
    Assembly.deafen,
    Assembly.restart,
    Assembly.resign,
)


def _joined(leader: Councils) -> list[Launcher]:
    """Those that have joined, reached or not."""
    electors = leader.electors
    return list(dict.fromkeys((*electors.seats, *electors.untried, *electors.tried)))


def _table(council: wire.Council) -> tuple[int, int]:
    """Incarnation and table."""
    first = council.table[0].placement if council.table else None
    return (first.incarnation, first.master_port) if first is not None else (-1, -1)
