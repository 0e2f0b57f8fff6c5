"""Which launchers elect the next host of the controller, and which rank table they all know: the leader's half, pure.

A council is replaced as a whole by the next version, and counts once a quorum has kept it. Seats change in two steps,
as in Raft: in between a majority of the former ones is needed too, so that any two quorums that can act share a
launcher. The other half is `keepstep.launch.controller.lease`; see docs/design/election.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import structs

from keepstep.control.membership.rendezvous import Launcher
from keepstep.core.quorum import is_quorum
from keepstep.wire.messages import MOST_SEATS, Council, Kept, Placement, Row, Seat, Stop

_AWAY_S = 5.0  # another launcher may have the seat of one that has had no connection for so long
_MOST_REACHED = 4 * MOST_SEATS  # a few of thousands of launchers are enough to choose from


class Electors:
    """Launchers that can vote, or may come to. ``token``: of the seat of the launcher beside this controller."""

    def __init__(self, token: int) -> None:
        self._token = token
        self._own: Launcher | None = None  # the launcher beside this controller

        # A launcher may have a seat once its election port has been reached. Until then it is untried, or being tried.
        self.seats: dict[Launcher, Seat] = {}
        self.untried: dict[Launcher, Seat] = {}
        self.tried: dict[Launcher, Seat] = {}

        # Of those that may have a seat: which have no connection, since when, and which have said that they will go.
        self.away: dict[Launcher, float] = {}
        self._leaving: set[Launcher] = set()

    def here(self, launcher: Launcher, seat: Seat, electing: Collection[Seat]) -> None:
        """A launcher has joined. It has to be reached first, unless it is this host's own or elects already."""
        self.back(launcher)
        seat = structs.replace(seat, node=launcher.node, pid=launcher.pid)
        is_own = seat.token == self._token
        self._own = launcher if is_own else self._own
        is_reached = is_own or seat in electing or self.seats.get(launcher) == seat
        (self.seats if is_reached else self.untried)[launcher] = seat

    def back(self, launcher: Launcher) -> None:
        """A launcher has a connection, so it is neither away nor about to leave."""
        self.away.pop(launcher, None)
        self._leaving.discard(launcher)
        self.tried.pop(launcher, None)

    def to_reach(self, table: Mapping[Launcher, Placement]) -> list[tuple[Launcher, Seat]]:
        """Launchers whose election ports are to be tried now: a few of those that could elect."""
        room = _MOST_REACHED - len(self.seats) - len(self.tried)
        if room <= 0 or not self.untried or not table:
            return []
        could = [one for one in self.untried if one in table or 1 < len(table) < MOST_SEATS][:room]
        for launcher in could:
            self.tried[launcher] = self.untried.pop(launcher)
        return [(launcher, self.tried[launcher]) for launcher in could]

    def reached(self, launcher: Launcher) -> None:
        """A launcher's election port answers, so it may elect."""
        if (seat := self.tried.pop(launcher, None)) is not None:
            self.seats[launcher] = seat

    def leaves(self, launcher: Launcher) -> None:
        """A launcher will go and not come back: it votes until it is gone, and keeps no seat."""
        self.untried.pop(launcher, None)
        self.tried.pop(launcher, None)
        if launcher in self.seats:
            self._leaving.add(launcher)

    def gone(self, launcher: Launcher, now_s: float) -> None:
        """A launcher's last connection has gone: it keeps its seat for a moment, unless it said that it leaves."""
        self.untried.pop(launcher, None)
        self.tried.pop(launcher, None)
        if launcher in self._leaving:
            self._leaving.discard(launcher)
            self.away.pop(launcher, None)
            del self.seats[launcher]
        elif launcher in self.seats:
            self.away[launcher] = now_s

    def tick(self, now_s: float) -> None:
        """Time passes: launchers that have been away for too long may elect no more."""
        for launcher in [one for one, since_s in self.away.items() if now_s - since_s >= _AWAY_S]:
            del self.away[launcher], self.seats[launcher]

    @property
    def own(self) -> Seat | None:
        """The seat of the launcher beside this controller."""
        return self.seats.get(self._own) if self._own is not None else None

    def wanted(
        self, own: Seat, seated: Collection[Seat], table: Mapping[Launcher, Placement]
    ) -> tuple[Seat, ...]:
        """Who is to have a seat: our own launcher, members that have one, others from all over the table, then spares.

        Spares are fewer than members, so members are a majority: where all of them live, nothing that happens to spares
        ends the job. And where members are lost at once, spares stand in for them. A member that is away keeps its seat
        while no other could have it.
        """
        could = {seat: one for one, seat in self.seats.items() if one not in self._leaving}
        had = [seat for seat in seated if seat in could]
        others = [seat for seat in dict.fromkeys((*had, *could)) if seat != own]
        here = [seat for seat in others if could[seat] not in self.away]
        members = [seat for seat in others if could[seat] in table]
        most = min(len(members) + 1, MOST_SEATS)  # seats of members and our own; spares come on top
        spares = max(min(len(members) - (self._own not in table), MOST_SEATS - most), 0)
        chosen = [own, *(seat for seat in members if seat in had and seat in here)][:most]
        new = [seat for seat in members if seat not in had and seat in here]
        new.sort(key=lambda seat: table[could[seat]].node_rank)
        count = min(most - len(chosen), len(new))
        chosen += [new[n * len(new) // count] for n in range(count)]
        away = [seat for seat in members if seat in had and seat not in here][: most - len(chosen)]
        return (*chosen, *[seat for seat in here if seat not in members][:spares], *away)


class Councils:
    """Proposes councils, counts who has kept the newest one, and knows what is settled.

    ``token``: of the seat of the launcher beside this controller; 0: there are no elections, so everything is settled
    at once. ``term``: the controller's term of office. ``port``: where the controller listens.
    """

    def __init__(self, token: int, term: int, port: int = 0) -> None:
        self.term = term
        self._token = token
        self.port = port
        self.electors = Electors(token)
        self._table: Mapping[Launcher, Placement] = {}
        self._rows: tuple[Row, ...] = ()  # the rank table as the council stores it
        self.newest: Council | None = None  # the newest that was proposed, whether or not it is settled
        self._kept: set[int] = set()  # tokens of electors that have kept the newest
        self.is_settled = True  # a quorum has kept the newest
        self._is_for_all = True  # the newest differs from the one before in more than its table
        self._is_ours = True  # no other controller proposed the newest
        self._inherited: Council | None = None  # proposed by another controller, not by this one yet
        self._settled_incarnation = -1
        self._stop: Stop | None = None

    def allows(self, incarnation: int) -> bool:
        """Whether placements of this incarnation may be given out: no other leader can ever give out others."""
        return not self._token or incarnation <= self._settled_incarnation

    def end(self, stop: Stop) -> None:
        """The job is to end with this, unless an earlier leader may have told somebody of another end already."""
        self._stop = self._stop or stop

    @property
    def stop(self) -> Stop | None:
        """What the job ends with, once no later leader can end it otherwise or have it go on."""
        if self.newest is None:
            return self._stop
        return self.newest.stop if self.is_settled else None

    def restore(self, held: Council) -> None:
        """Go on with the council of an earlier controller. Whether a quorum has kept it is not known."""
        self.newest = self._inherited = held
        self._stop = held.stop
        self.is_settled = False

    def here(self, launcher: Launcher, seat: Seat | None) -> None:
        """A launcher has joined; ``seat``: where it can be asked for its vote, if it can."""
        newest = self.newest
        if seat is None or not self._token:
            self.electors.back(launcher)
        else:
            self.electors.here(launcher, seat, (*newest.seats, *newest.former) if newest is not None else ())

    def kept(self, launcher: Launcher, kept: Kept) -> bool:
        """A launcher has kept a council. True when that settles the newest one."""
        seat, newest = self.electors.seats.get(launcher), self.newest
        if seat is None or newest is None or (kept.term, kept.version) != (newest.term, newest.version):
            return False
        self._kept.add(seat.token)
        # The elector beside us has to be among them: its lease counts by the council that it keeps, and by an older one
        # it would be other electors' lease.
        if self.is_settled or self._token not in self._kept:
            return False
        seats, former = ([seat.token for seat in some] for some in (newest.seats, newest.former))
        if not is_quorum(seats, former, self._kept):
            return False
        self.is_settled = self._is_ours = True
        self._settled_incarnation = max((row.placement.incarnation for row in newest.table), default=-1)
        return True

    def tick(self, table: Mapping[Launcher, Placement], now_s: float) -> Council | None:
        """The next council, where one is due; it has to be stored, then told to all. ``table`` itself never changes."""
        self.electors.tick(now_s)
        own = self.electors.own
        if not self._token or own is None or not table:
            return None
        newest = self.newest
        if table is not self._table:
            self._table = table
            self._rows = tuple(Row(one.node, one.pid, placement) for one, placement in table.items())
        rows = self._rows
        if newest is None:
            seats = self.electors.wanted(own, (), table)
            return self._propose(Council(self.term, 1, own, self.port, seats, (), rows))
        if self._inherited is not None:
            # It may have been settled or not. So it is proposed as it is, and nothing else before it is settled in our
            # term.
            self._inherited, self._is_ours = None, False
            return self._propose(structs.replace(newest, term=self.term, leader=own, port=self.port))
        wanted = self.electors.wanted(own, newest.seats, table)
        differ = set(wanted) != set(newest.seats) or wanted[0] != newest.seats[0]
        if not self.is_settled:
            # The new seats alone can decide nothing before this council is settled, so others may be proposed instead.
            if newest.former and differ and self._is_ours:
                return self._propose(structs.replace(newest, seats=wanted, table=rows))
            return None
        if newest.stop != self._stop:
            return self._propose(structs.replace(newest, stop=self._stop))
        if newest.former:
            return self._propose(structs.replace(newest, former=(), table=rows))
        if differ:
            return self._propose(structs.replace(newest, seats=wanted, former=newest.seats, table=rows))
        return self._propose(structs.replace(newest, table=rows)) if rows != newest.table else None

    def tells(self, launcher: Launcher) -> Council | None:
        """The newest council for this launcher; None if only its table is new, and the launcher does not elect."""
        told = self.told(launcher)
        return told if told is not None and (told.table or self._is_for_all) else None

    def told(self, launcher: Launcher) -> Council | None:
        """The newest council as this launcher may know it: only electors get the table."""
        newest, seat = self.newest, self.electors.seats.get(launcher)
        if newest is None or newest.term != self.term:
            return None
        elects = seat is not None and (seat in newest.seats or seat in newest.former)
        return newest if elects else structs.replace(newest, table=())

    def _propose(self, council: Council) -> Council:
        before = self.newest
        self.newest = structs.replace(council, version=before.version + 1 if before is not None else 1)
        self._is_for_all = before is None or _without_table(before) != _without_table(council)
        self._kept.clear()
        self.is_settled = False
        return self.newest


def _without_table(council: Council) -> Council:
    return structs.replace(council, version=0, table=())
