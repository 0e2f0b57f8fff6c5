"""Who may elect the next host of the controller, and which rank table they all know. Pure; the leader's half.

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

    ``token``: of the launcher beside us, 0 when nobody is ever elected: then everything is settled at once.
    """

    def __init__(self, token: int, term: int, port: int = 0) -> None:
        self.term = term
        self._token = token
        self.port = port  # this controller listens on it
        self.electors = Electors(token)
        self._table: Mapping[Launcher, Placement] = {}
        self._rows: tuple[Row, ...] = ()  # the same table as it stands in a council
        self._newest: Council | None = None
        self._kept: set[int] = set()  # tokens of electors that have kept the newest
        self._is_settled = True  # a quorum has kept the newest
        self._is_for_all = True  # the newest differs from the one before in more than its table
        self._is_ours = True  # no other controller proposed the newest
        self._inherited: Council | None = (
            None  # one that another controller proposed, and this one has not yet
        )
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
        """It has joined."""
        newest = self._newest
        if seat is None or not self._token:
            self.electors.back(launcher)
        else:
            self.electors.here(launcher, seat, (*newest.seats, *newest.former) if newest is not None else ())

    def kept(self, launcher: Launcher, kept: Kept) -> bool:
        """An answer to the newest council; True when that settles it."""
        seat, newest = self.electors.seats.get(launcher), self._newest
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
        self.electors.tick(now_s)
        own = self.electors.own
        if not self._token or own is None or not table:
            return None
        newest = self._newest
        if table is not self._table:
            self._table = table
            self._rows = tuple(Row(one.node, one.pid, placement) for one, placement in table.items())
        rows = self._rows
        if newest is None:
            seats = self.electors.wanted(own, (), table)
            return self._propose(Council(self.term, 1, own, self.port, seats, (), rows))
        if self._inherited is not None:
            # As it is, and nothing else before it is settled in our term: it may have been, or not.
            self._inherited, self._is_ours = None, False
            return self._propose(structs.replace(newest, term=self.term, leader=own, port=self.port))
        wanted = self.electors.wanted(own, newest.seats, table)
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
        newest, seat = self._newest, self.electors.seats.get(launcher)
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


def _tokens(seats: tuple[Seat, ...]) -> list[int]:
    return [seat.token for seat in seats]


def _without_table(council: Council) -> Council:
    return structs.replace(council, version=0, table=())


def _incarnation(council: Council) -> int:
    return max((row.placement.incarnation for row in council.table), default=-1)
