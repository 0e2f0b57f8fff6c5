"""Which launchers may elect the next host of the controller, and which of them are to have the few seats."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import structs

from keepstep.control.membership.rendezvous import Launcher
from keepstep.wire.messages import MOST_SEATS, Placement, Seat

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
