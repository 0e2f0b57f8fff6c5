"""The lease on the controller, and the election of its host. Pure: messages and time in, messages out.

Every launcher of the council grants leases but keeps none on disk: each request carries the lease that the asker has,
and a lease counts with the grants of a quorum. A launcher that is started again is another elector: it grants nothing
before a council names it, so nothing that it has forgotten can be granted twice. See docs/design/election.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import structs

from keepstep import wire
from keepstep.core.quorum import is_quorum

TTL_S = 3.0
UNREACHED_S = 20.0  # seconds after which a leader that does not reach its own controller resigns
_RENEWALS = 3  # how often a lease is renewed before it would end
_SPREAD_S = 1.5  # seconds over which electors begin to stand, at random


class Elector:
    """One launcher's vote, its lease when it has one, and the newest council that it knows."""

    def __init__(self, seat: wire.Seat, dice: Callable[[], float]) -> None:
        """``dice`` gives numbers from 0 to 1."""
        self.seat = seat
        self._dice = dice
        self.council: wire.Council | None = None
        self.leads = 0  # the term in which this launcher hosts the controller; 0: it does not
        self.leader = wire.Leads(0)  # the newest controller that is known
        self._term: int = 0  # the newest term in which a lease was granted here, or elsewhere
        self._holder = 0  # the seat that has the lease which was granted here
        self._until_s = -math.inf  # time before which no other seat is granted a lease
        self._stands = 0  # the term for which this launcher asks others; 0: it does not
        self._grants: dict[int, float] = {}  # by seat, until when its grant to this launcher counts
        self._asked_s: dict[int, float] = {}  # by number of the question, when it was asked
        self._number = 0  # number of the last question
        self._next_s = 0.0  # when to ask next
        self._lonely = False  # waits at random before it stands, because no controller is heard
        self._has_resigned = False
        self._acted_s: float | None = None  # when this launcher had the lease last, while it leads
        # When this node last reached the controller that it hosts, while it leads.
        self._reached_s: float | None = None

    @property
    def term(self) -> int:
        """The newest term in which a leader is known; orders of controllers of older terms are void."""
        return max(self.leader.term, self.leads)

    @property
    def inheritance(self) -> wire.Council | None:
        """The council with which a controller here goes on.

        It is led by this launcher where the former leader has granted it the lease, else still by that one.
        """
        council = self.council
        if council is not None and council.leader.token in self._grants:
            return structs.replace(council, leader=self.seat)
        return council

    @property
    def can_elect(self) -> bool:
        """Whether a quorum is left when the leader of the newest council is lost."""
        council = self.council
        if council is None:
            return False
        others = {seat.token for seat in (*council.seats, *council.former)} - {council.leader.token}
        return is_quorum(
            [seat.token for seat in council.seats], [seat.token for seat in council.former], others
        )

    @property
    def has_seat(self) -> bool:
        """Whether it has a seat in the newest council, or in the one before while that may still act."""
        council = self.council
        return council is not None and self.seat.token in {
            seat.token for seat in (*council.seats, *council.former)
        }

    def may_act(self, now_s: float) -> bool:
        """Whether this launcher has the lease now."""
        return self.leads > 0 and self._counts(now_s)

    def idle_s(self, now_s: float) -> float:
        """For how long this launcher has led without the lease."""
        return now_s - self._acted_s if self.leads and self._acted_s is not None else 0.0

    def where(self, now_s: float) -> wire.Leads:
        """The answer to a launcher that asks where the controller is."""
        return structs.replace(self.leader, acts=self.may_act(now_s))

    def learned(self, leads: wire.Leads) -> None:
        """Note a controller that another launcher knows, if it is newer."""
        if leads.port and leads.term > self.term:
            self.leader = leads

    def resign(self, now_s: float) -> None:
        """Let others lead for a while, because the controller cannot be kept running here."""
        self.leads, self._has_resigned = 0, True
        self._grants.clear()
        self._next_s = now_s + 4 * TTL_S

    def serves(self, port: int) -> None:
        """Note the port of the controller that runs here."""
        self.leader = wire.Leads(self.leads, self.seat.address, port)

    # Messages that come in.

    def received(self, council: wire.Council, now_s: float) -> wire.Kept | None:
        """Take the council that a controller has sent; returns the answer to it, None for an old one."""
        if council.term < self._term or _order(council) < _order(self.council):
            return None
        leader = council.leader.token
        if council.term != self.leads:
            self.leads = 0
        if leader == self.seat.token and not self.leads:
            if council.term != 1 or self._has_resigned:
                return None  # this launcher has given up that term
            self.leads = council.term  # the first controller begins without an election
        self.council = council
        self._stands = 0
        self._term, self._holder, self._until_s = council.term, leader, now_s + TTL_S
        if council.term >= self.leader.term:
            self.leader = wire.Leads(council.term, council.leader.address, council.port)
        return wire.Kept(council.term, council.version)

    def asked(self, ask: wire.Ask, now_s: float) -> wire.Answer | None:
        """Answer another launcher that asks for the lease; None: the question is for another seat."""
        if ask.to != self.seat.token:
            return None
        granted = self._grant(ask, now_s)
        leads = wire.Leads(ask.term, ask.address, ask.port)
        if granted and ask.port and ask.term >= self.leader.term:
            self.leader = leads
        self.learned(leads)  # others have elected it, whether this launcher grants it the lease or not
        return wire.Answer(ask.number, self.seat.token, granted, self._term)

    def _grant(self, ask: wire.Ask, now_s: float) -> bool:
        council = self.council
        if council is None or ask.term < self._term or ask.term <= self._stands:
            return False
        if ask.term == self._term:
            if self._holder != ask.by:
                return False
        elif (now_s < self._until_s and self._holder != ask.by) or ask.held < _order(council):
            return False
        if ask.term > self.leads:
            self.leads = 0
        self._stands = 0
        self._term, self._holder, self._until_s = ask.term, ask.by, now_s + TTL_S
        return True

    def answered(self, answer: wire.Answer, now_s: float) -> None:
        """Take an answer to a question of this launcher."""
        if answer.term > max(self._term, self._stands):
            if self.may_act(now_s):
                return  # only a minority can have granted another term while this lease stands
            self._term, self._holder, self._stands, self.leads = answer.term, 0, 0, 0
            return
        asked_s = self._asked_s.get(answer.number)
        if not answer.granted or asked_s is None:
            return
        self._grants[answer.by] = max(self._grants.get(answer.by, 0.0), asked_s + TTL_S)
        if self._stands and self._counts(now_s):
            self.leads = self._term = self._stands
            self._holder, self._until_s, self._stands = self.seat.token, now_s + TTL_S, 0
            self._next_s = now_s

    def tick(self, now_s: float, *, connected: bool) -> list[tuple[wire.Seat, wire.Ask]]:
        """Renew the lease or stand for it when it is time; returns questions, each with the seat that it is for.

        ``connected``: to a controller whose orders count.
        """
        others = self._others()
        if not others and not self.leads:
            return []
        if self.leads:
            if self._acted_s is None or self._counts(now_s):
                self._acted_s = now_s
            if connected or self._reached_s is None:
                self._reached_s = now_s
            if others and now_s - self._reached_s >= UNREACHED_S:
                self.resign(now_s)
                return []
            self._until_s = max(self._until_s, now_s + TTL_S)  # no other seat is granted one here
            self._grants[self.seat.token] = now_s + TTL_S
            if now_s < self._next_s:
                return []
            self._next_s = now_s + TTL_S / _RENEWALS
            return self._ask(others, self.leads, now_s)
        self._acted_s = self._reached_s = None
        if connected or now_s < self._until_s:
            self._lonely, self._stands = False, 0
            return []
        if not self._lonely:
            self._lonely = True
            self._next_s = max(self._next_s, now_s + _SPREAD_S * self._dice())
        if now_s < self._next_s:
            return []
        self._next_s = now_s + _SPREAD_S * (0.5 + self._dice())
        self._stands = max(self._term, self._stands) + 1
        self._grants = {self.seat.token: now_s + TTL_S}
        self._asked_s.clear()
        return self._ask(others, self._stands, now_s)

    def _ask(self, others: list[wire.Seat], term: int, now_s: float) -> list[tuple[wire.Seat, wire.Ask]]:
        self._number += 1
        self._asked_s = {n: s for n, s in self._asked_s.items() if now_s - s < TTL_S}
        self._asked_s[self._number] = now_s
        ask = wire.Ask(self._number, 0, self.seat.token, term, self.leads, _order(self.council))
        if self.leads and self.leader.term == self.leads:
            ask = structs.replace(ask, address=self.leader.address, port=self.leader.port)
        return [(seat, structs.replace(ask, to=seat.token)) for seat in others]

    def _others(self) -> list[wire.Seat]:
        """The other seats of the council; none where this launcher has no seat in it."""
        council = self.council
        if council is None:
            return []
        seats = {seat.token: seat for seat in (*council.seats, *council.former)}
        own = seats.pop(self.seat.token, None)
        return list(seats.values()) if own is not None else []

    def _counts(self, now_s: float) -> bool:
        council = self.council
        if council is None:
            return True  # without a council no other launcher can be elected
        yes = [token for token, until_s in self._grants.items() if until_s > now_s]
        return is_quorum([seat.token for seat in council.seats], [seat.token for seat in council.former], yes)


def _order(council: wire.Council | None) -> tuple[int, int]:
    return (council.term, council.version) if council is not None else (0, 0)
