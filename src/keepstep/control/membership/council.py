"""Which launchers elect the next host of the controller, and which rank table they all know: the leader's half, pure.

A council is replaced as a whole by the next version, and counts once a quorum has kept it. Seats change in two steps,
as in Raft: in between a majority of the former ones is needed too, so that any two quorums that can act share a
launcher. The other half is `keepstep.launch.controller.lease`; see docs/design/election.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import structs

from keepstep.control.membership.electors import Electors
from keepstep.control.membership.rendezvous import Launcher
from keepstep.core.quorum import is_quorum
from keepstep.wire.messages import Council, Kept, Placement, Row, Seat, Stop


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
        if not is_quorum(_tokens(newest.seats), _tokens(newest.former), self._kept):
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


def _tokens(seats: tuple[Seat, ...]) -> list[int]:
    return [seat.token for seat in seats]


def _without_table(council: Council) -> Council:
    return structs.replace(council, version=0, table=())
