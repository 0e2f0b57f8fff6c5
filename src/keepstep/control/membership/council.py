"""Who may elect the next host of the controller, and which rank table they all know. Pure; the leader's half.

A council is replaced as a whole by the next version, and counts once a quorum has kept it. Seats change in two steps,
as in Raft: in between a majority of the former ones is needed too, so that any two quorums that can act share a
launcher. The other half is `keepstep.launch.controller.lease`; see docs/design/election.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from keepstep.control.membership.reforming_orders import Exclude
from keepstep.control.membership.rendezvous import Launcher
from keepstep.core.quorum import is_quorum
from keepstep.wire.messages import MOST_SEATS, Council, Kept, Placement, Row, Seat, Stop

_AWAY_S = 5.0  # without a connection: another may have the seat
_MOST_REACHED = 4 * MOST_SEATS  # of thousands of launchers


class Councils:
    """Proposes councils, counts who has kept the newest one, and knows what is settled.

    ``token``: of the launcher beside us, 0 when nobody is ever elected: then everything is settled at once.
    """

    def __init__(self, token: int, term: int, port: int = 0) -> None:
        self.term = term
        self._token = token
        self.port = port  # this controller listens on it
        self.excluded: list[
            Exclude
        ] = []  # launchers left out of a table on which electors have not agreed yet
        self._seats: dict[
            Launcher, Seat
        ] = {}  # of launchers that can be reached, and are here or were a moment ago
        self._untried: dict[Launcher, Seat] = {}  # of those of which it is not known
        self._tried: dict[Launcher, Seat] = {}
        self._away: dict[Launcher, float] = {}
        self._leaving: set[Launcher] = set()
        self._table: Mapping[Launcher, Placement] = {}
        self._rows: tuple[Row, ...] = ()  # of this table
        self._own: Launcher | None = None
        self._newest: Council | None = None
        self._kept: set[int] = set()
        self._is_settled = True  # a quorum has the newest
        self._is_for_all = True  # it has other electors than the one before
        self._is_ours = True  # and it was not begun by another controller
        self._inherited: Council | None = None  # not proposed yet in our own name
        self._settled_incarnation = -1
        self._stop: Stop | None = None

    @property
    def newest(self) -> Council | None:
        """To be told to everybody that comes."""
        return self._newest

    @property
    def is_settled(self) -> bool:
        """A quorum has kept the newest."""
        return self._is_settled

    def allows(self, incarnation: int) -> bool:
        """Whether placements of this incarnation may be given out: no other leader can ever give out others."""
        return not self._token or incarnation <= self._settled_incarnation

    def end(self, stop: Stop) -> None:
        """The job is to end with this; what an earlier leader may have told somebody counts."""
        self._stop = self._stop or stop

    @property
    def stop(self) -> Stop | None:
        """What the job ends with, once no later leader can end it, or go on, otherwise."""
        if self._newest is None:
            return self._stop
        return self._newest.stop if self._is_settled else None

    def restore(self, held: Council) -> None:
        """Go on with what an earlier controller began: whether it was settled is not known."""
        self._newest = self._inherited = held
        self._stop = held.stop
        self._is_settled = False

    def here(self, launcher: Launcher, seat: Seat | None) -> None:
        """It has joined. Others than this host's own, and those that elect already, have to be reached first."""
        self._away.pop(launcher, None)
        self._leaving.discard(launcher)
        self._tried.pop(launcher, None)
        if seat is None or not self._token:
            return
        seat = structs.replace(seat, node=launcher.node, pid=launcher.pid)
        self._own = launcher if seat.token == self._token else self._own
        elects = self._newest is not None and seat in (*self._newest.seats, *self._newest.former)
        if seat.token == self._token or elects or self._seats.get(launcher) == seat:
            self._seats[launcher] = seat
        else:
            self._untried[launcher] = seat

    def to_reach(self, table: Mapping[Launcher, Placement]) -> list[tuple[Launcher, Seat]]:
        """Whose election ports are to be reached now, so that they may elect: a few of those that could."""
        room = _MOST_REACHED - len(self._seats) - len(self._tried)
        if room <= 0 or not self._untried or not table:
            return []
        could = [one for one in self._untried if one in table or 1 < len(table) < MOST_SEATS]
        for launcher in could[:room]:
            self._tried[launcher] = self._untried.pop(launcher)
        return [(launcher, self._tried[launcher]) for launcher in could[:room]]

    def reached(self, launcher: Launcher) -> None:
        """So it may elect."""
        if (seat := self._tried.pop(launcher, None)) is not None:
            self._seats[launcher] = seat

    def leaves(self, launcher: Launcher) -> None:
        """It will go, and not come back: it votes until it is gone, and keeps no seat."""
        self._untried.pop(launcher, None)
        self._tried.pop(launcher, None)
        if launcher in self._seats:
            self._leaving.add(launcher)

    def gone(self, launcher: Launcher, now_s: float) -> None:
        """Its connection has gone."""
        self._untried.pop(launcher, None)
        self._tried.pop(launcher, None)
        if launcher in self._leaving:
            self._leaving.discard(launcher)
            self._away.pop(launcher, None)
            del self._seats[launcher]
        elif launcher in self._seats:
            self._away[launcher] = now_s

    def kept(self, launcher: Launcher, kept: Kept) -> bool:
        """An answer to the newest council; True when that settles it."""
        seat, newest = self._seats.get(launcher), self._newest
        if seat is None or newest is None or (kept.term, kept.version) != (newest.term, newest.version):
            return False
        self._kept.add(seat.token)
        # The lease beside us counts by the council that is kept there: by an older one others would be its electors.
        if self._is_settled or self._token not in self._kept:
            return False
        if not is_quorum(_tokens(newest.seats), _tokens(newest.former), self._kept):
            return False
        self._is_settled = self._is_ours = True
        self._settled_incarnation = _incarnation(newest)
        return True

    def tick(self, table: Mapping[Launcher, Placement], now_s: float) -> Council | None:
        """The next council, where one is due; it has to be stored, then told to all. A table is never changed."""
        for launcher, since_s in list(self._away.items()):
            if now_s - since_s >= _AWAY_S:
                del self._away[launcher], self._seats[launcher]
        own = self._seats.get(self._own) if self._own is not None else None
        if not self._token or own is None or not table:
            return None
        newest = self._newest
        if table is not self._table:
            self._table = table
            self._rows = tuple(Row(one.node, one.pid, placement) for one, placement in table.items())
        rows = self._rows
        if newest is None:
            return self._propose(Council(self.term, 1, own, self.port, self._wanted(own, table), (), rows))
        if self._inherited is not None:
            # As it is, and nothing else before it is settled in our term: it may have been, or not.
            self._inherited, self._is_ours = None, False
            return self._propose(structs.replace(newest, term=self.term, leader=own, port=self.port))
        wanted = self._wanted(own, table)
        differ = set(wanted) != set(newest.seats) or wanted[0] != newest.seats[0]
        if not self._is_settled:
            # Nobody can act for the new seats alone before this is settled: others may be tried.
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
        """The newest, if it is news to this launcher: others than electors have no use for each table."""
        told = self.told(launcher)
        return told if told is not None and (told.table or self._is_for_all) else None

    def told(self, launcher: Launcher) -> Council | None:
        """The newest as this launcher is to know it: the table goes to the electors alone."""
        newest, seat = self._newest, self._seats.get(launcher)
        if newest is None or newest.term != self.term:
            return None
        elects = seat is not None and (seat in newest.seats or seat in newest.former)
        return newest if elects else structs.replace(newest, table=())

    def _propose(self, council: Council) -> Council:
        before = self._newest
        self._newest = structs.replace(council, version=before.version + 1 if before is not None else 1)
        self._is_for_all = before is None or _without_table(before) != _without_table(council)
        self._kept.clear()
        self._is_settled = False
        return self._newest

    def _wanted(self, own: Seat, table: Mapping[Launcher, Placement]) -> tuple[Seat, ...]:
        """Ours first, members that have one, others from all over the table, then spares, fewer than members.

        So members are a majority: where they all live, nothing that becomes of spares ends the job. And where members
        are lost at once, spares stand in for them. A member that is away keeps its seat while no other could have it.
        """
        could = {seat: one for one, seat in self._seats.items() if one not in self._leaving}
        had = [seat for seat in (self._newest.seats if self._newest is not None else ()) if seat in could]
        others = [seat for seat in dict.fromkeys((*had, *could)) if seat != own]
        here = [seat for seat in others if could[seat] not in self._away]
        members = [seat for seat in others if could[seat] in table]
        most = min(len(members) + 1, MOST_SEATS)  # and spares beside them
        spares = max(min(len(members) - (self._own not in table), MOST_SEATS - most), 0)
        chosen = [own, *(seat for seat in members if seat in had and seat in here)][:most]
        new = [seat for seat in members if seat not in had and seat in here]
        new.sort(key=lambda seat: table[could[seat]].node_rank)
        count = min(most - len(chosen), len(new))
        chosen += [new[n * len(new) // count] for n in range(count)]
        away = [seat for seat in members if seat in had and seat not in here][: most - len(chosen)]
        return (*chosen, *[seat for seat in here if seat not in members][:spares], *away)


def _tokens(seats: tuple[Seat, ...]) -> list[int]:
    return [seat.token for seat in seats]


def _without_table(council: Council) -> Council:
    return structs.replace(council, version=0, table=())


def _incarnation(council: Council) -> int:
    return max((row.placement.incarnation for row in council.table), default=-1)
