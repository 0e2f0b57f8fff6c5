"""What an operator orders by hand (``keepstep ctl``): one wish at a time, answered when it is done or refused.

Pure: orders for the recovery's core come out, which ends and begins workers as after a failure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from keepstep.control.effects import Effect, Send, Tell
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.reforming_orders import End, Lapsed, Order
from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.core.ranges import fold_nodes
from keepstep.wire.messages import Operate, Operated, Seal

STOPPED = 79  # exit code of a job that an operator stopped
_SUSPENDED = "it is suspended; say resume"
_SEAL_S = 120.0  # for every rank to seal a step
_GROW_S = 1800.0  # the same when nobody waits for an answer
_WARM_S = 60.0  # more for a move that nobody waits for: standbys are to be warm before (`launch.restarts`)


@dataclass(slots=True)
class _Wish:
    peer: int | None  # None: nobody waits for an answer
    verb: str
    until_s: float
    unsealed: set[Launcher]
    step: int = -1  # that all who answered have sealed
    ordered: bool = False
    why: str = ""  # of one that is no operator's
    exchange: Mapping[Launcher, Launcher] = field(
        default_factory=dict[Launcher, Launcher]
    )  # who takes whose place
    unfit: dict[Launcher, str] = field(default_factory=dict[Launcher, str])  # who is to be replaced, and why

    @property
    def moves(self) -> bool:
        """Ranks are to play on other nodes."""
        return bool(self.exchange or self.unfit)


class Sharing(Protocol):
    """What must be known of backups."""

    def withheld(self) -> str:
        """Why nodes cannot have each other's states; "": they can."""
        ...


class Operating:
    """See the module.

    ``effects``: what the controller is about to do; ``backups``: whether nodes can have each other's states.
    """

    def __init__(
        self, rendezvous: Rendezvous, reforming: Reforming, backups: Sharing, effects: list[Effect]
    ) -> None:
        self._rendezvous, self._reforming = rendezvous, reforming
        self._backups, self._effects = backups, effects
        self._wish: _Wish | None = None
        self._declined = -1  # incarnation whose ranks seal nothing that more nodes can begin with

    def asked(self, peer: int, message: Operate, standstill: str, now_s: float) -> list[Order]:
        """An operator's order. ``standstill``: why the job runs no more, "" while it does."""
        if message.verb == "stop" and not standstill:
            self._answer(peer, Operated("the job ends"))
            return [End(STOPPED, "stopped by an operator", by_operator=True)]
        lapsed = self._lapse("an operator's order came first") if self.is_growing else []
        return [*lapsed, *self._take_on(peer, message, standstill, now_s)]

    def _take_on(self, peer: int, message: Operate, standstill: str, now_s: float) -> list[Order]:
        if why := standstill or self._objection(message.verb):
            self._answer(peer, Operated(refused=why))
            return []
        if message.verb in ("start", "resume"):
            self._wish = _Wish(peer, message.verb, now_s, set(), ordered=True)
            return self._reforming.resume(now_s)
        members = set(self._rendezvous.placements)
        wish = _Wish(peer, message.verb, now_s + _SEAL_S, members)
        if message.verb in ("exchange", "replace"):
            named = self._named(message.nodes)
            if why := named if isinstance(named, str) else self._take(wish, named):
                self._answer(peer, Operated(refused=why))
                return []
        self._wish = wish
        if message.now or self._reforming.under_way:
            return self._order(wish, now_s)
        self._ask_to_seal(wish)
        return []

    @property
    def is_growing(self) -> bool:
        """All ranks have been asked to seal what more nodes can begin with, or what others can play on from."""
        return self._wish is not None and self._wish.peer is None

    def grow(self, why: str, now_s: float) -> None:
        """Have the job begin again with more nodes, when all ranks have sealed what all of them can begin with."""
        incarnation = self._reforming.incarnation
        if self._objection("restart") or incarnation == self._declined:
            return
        wish = self._wish = _Wish(None, "grow", now_s + _GROW_S, set(self._rendezvous.placements), why=why)
        self._effects.append(Send(self._peers(wish.unsealed), Seal(incarnation, alike=True, warm=True)))

    def exchange(self, takers: Mapping[int, int], why: str, now_s: float) -> str:
        """Have nodes take others' ranks when all have sealed a step; why not, or "".

        ``takers``: who takes a node's ranks, by that node; each once (node ranks). Whether it was done is told by the
        next rank table.
        """
        by_rank = {one.node_rank: launcher for launcher, one in self._rendezvous.placements.items()}
        if refused := self._objection("exchange"):
            return refused
        if self._reforming.under_way:
            return "the job begins again just now"
        if not takers.keys() <= by_rank.keys():
            return f"the job has {len(by_rank)} nodes now"
        exchange = {by_rank[one]: by_rank[taker] for one, taker in takers.items()}
        for one, taker in exchange.items():
            if refused := self._rendezvous.unequal(one, taker):
                return refused
        return self._have_done("exchange", why, now_s, exchange=exchange)

    def replace(self, unfit: Mapping[int, str], why: str, now_s: float) -> str:
        """Have spares take the ranks of these nodes (by rank, and why each) when all have sealed a step.

        Why not, or "". Whether it was done is told by the next rank table.
        """
        if refused := self._objection("replace") or self.irreplaceable(unfit):
            return refused
        table = self._rendezvous.placements.items()
        named = {launcher: unfit[one.node_rank] for launcher, one in table if one.node_rank in unfit}
        if self._reforming.under_way:
            return "the job begins again just now"
        return self._have_done("replace", why, now_s, unfit=named)

    def irreplaceable(self, nodes: Collection[int]) -> str:
        """Why spares cannot take these nodes' ranks (by rank); "": they can."""
        table = self._rendezvous.placements.items()
        members = [one for one, at in table if at.node_rank in nodes]
        return self._rendezvous.irreplaceable(members) if len(members) == len(nodes) else "it was not placed"

    def sealed(self, launcher: Launcher, incarnation: int, step: int, why: str, now_s: float) -> list[Order]:
        """All ranks of a launcher have sealed a step since they were asked; -1: they seal none, and ``why``."""
        wish = self._wish
        if wish is None or wish.ordered or incarnation != self._reforming.incarnation:
            return []
        if step < 0:
            none = why or "keeps no checkpoint in memory, so no step is sealed"
            if wish.peer is None:
                self._declined = self._declined if wish.moves else incarnation
                lapsed = self._lapse(f"node {launcher.node} {none}")
                return [
                    *lapsed,
                    Tell(f"{wish.why}; the job goes on without: node {launcher.node} {none}"),
                ]
            hint = "; --now ends the workers at once, and the script begins as after any restart"
            self._refuse(wish, f"node {launcher.node} {none}{'' if wish.moves else hint}")
            return []
        wish.unsealed.discard(launcher)
        wish.step = step if wish.step < 0 else min(wish.step, step)
        return [] if wish.unsealed else self._order(wish, now_s)

    def tick(self, peers: Collection[int], now_s: float) -> list[Order]:
        """Time passes. ``peers``: those that are connected."""
        wish = self._wish
        if wish is None:
            return []
        if wish.ordered:
            self._look(wish)
        elif wish.peer is None:
            if self._reforming.under_way:
                return self._lapse("a failure was faster")  # its re-forming takes in the newcomers
            if now_s >= wish.until_s:
                return self._lapse("not all ranks sealed a step")  # some node may not have heard
        elif wish.peer not in peers:
            self._wish = None  # nobody waits for it any more
        elif self._reforming.under_way:
            return self._order(wish, now_s)  # a failure was faster: nothing will be sealed
        elif now_s >= wish.until_s:
            missing = fold_nodes(sorted(launcher.node for launcher in wish.unsealed))
            self._refuse(
                wish, f"{missing} sealed no step within {_SEAL_S:g} s; --now ends the workers at once"
            )
        return []

    def end(self) -> None:
        """The job ends."""
        if self._wish is not None:
            self._refuse(self._wish, "the job ends")

    def _objection(self, verb: str) -> str:
        suspended, placed = self._reforming.suspended, self._rendezvous.placements
        if self._wish is not None:
            return f"{self._wish.verb} is under way already"
        if verb in ("start", "resume"):
            if not placed:
                return "not all nodes are here yet; it begins by itself when they are"
            return "" if suspended else "it is not suspended"
        if not placed:
            return "no worker has been started yet"
        if suspended:
            return "it is suspended already" if verb == "suspend" else _SUSPENDED
        if verb in ("exchange", "replace") and (why := self._backups.withheld()):
            return f"ranks that move would find no state on their new node: {why}"
        if len(placed) > 1 and not self._rendezvous.max_restarts:
            return "its nodes cannot begin again together: that takes --max-restarts when the job is started"
        return ""

    def _order(self, wish: _Wish, now_s: float) -> list[Order]:
        wish.ordered = True
        if wish.peer is None:
            self._wish = None
            return self._reforming.pause(
                now_s, hold=False, why=wish.why, exchange=wish.exchange, unfit=wish.unfit
            )
        hold = wish.verb == "suspend"
        if wish.moves and self._reforming.under_way:
            self._refuse(wish, "a failure was faster; say it again once the job trains")
            return []
        return self._reforming.pause(now_s, hold=hold, exchange=wish.exchange, unfit=wish.unfit)

    def _look(self, wish: _Wish) -> None:
        reforming = self._reforming
        if wish.verb == "suspend":
            if reforming.suspended:
                after = f" after step {wish.step}" if wish.step >= 0 else ""
                self._done(wish, f"suspended{after}: standbys and checkpoints are kept; go on with resume")
        elif reforming.suspended:  # it was so before, as a controller that began anew hears late
            self._refuse(wish, _SUSPENDED)
        elif not reforming.under_way:
            told = f"begins again, incarnation {reforming.incarnation}"
            if wish.exchange and not reforming.exchanged:
                self._refuse(wish, f"a node was lost meanwhile; the job {told}")
            elif left := wish.unfit.keys() & self._rendezvous.placements.keys():
                there = fold_nodes(sorted(one.node for one in left))
                self._refuse(wish, f"{there} stays, no spare was left for it; the job {told}")
            else:
                self._done(wish, told)

    def _done(self, wish: _Wish, text: str) -> None:
        if wish.peer is not None:
            self._answer(wish.peer, Operated(text))
        self._wish = None

    def _lapse(self, why: str) -> list[Order]:
        """What nobody waits for will not be."""
        wish, self._wish = self._wish, None
        return [Lapsed(why)] if wish is not None and wish.moves else []

    def _answer(self, peer: int, answer: Operated) -> None:
        self._effects.append(Send((peer,), answer))

    def _refuse(self, wish: _Wish, why: str) -> None:
        if wish.peer is not None:
            self._answer(wish.peer, Operated(refused=why))
        self._wish = None

    def _ask_to_seal(self, wish: _Wish) -> None:
        leaving = set(wish.exchange)
        incarnation, warm = self._reforming.incarnation, wish.peer is None  # an operator waits for an answer
        if leaving:
            self._effects.append(Send(self._peers(leaving), Seal(incarnation, leave=True, warm=warm)))
        if staying := wish.unsealed - leaving:
            self._effects.append(Send(self._peers(staying), Seal(incarnation, warm=warm)))

    def _have_done(
        self,
        verb: str,
        why: str,
        now_s: float,
        *,
        exchange: Mapping[Launcher, Launcher] | None = None,
        unfit: dict[Launcher, str] | None = None,
    ) -> str:
        until_s, members = now_s + _WARM_S + _SEAL_S, set(self._rendezvous.placements)
        self._wish = _Wish(None, verb, until_s, members, why=why, exchange=exchange or {}, unfit=unfit or {})
        self._ask_to_seal(self._wish)
        return ""

    def _take(self, wish: _Wish, named: list[Launcher]) -> str:
        """What an operator wants done with these members; why it cannot be, or ""."""
        if wish.verb == "replace":
            wish.unfit = dict.fromkeys(named, "an operator replaces it")
            return self._rendezvous.irreplaceable(named) if named else "give the node that is to be replaced"
        if len(named) != 2 or named[0] == named[1]:
            return "give two nodes that are to exchange their ranks"
        wish.exchange = {named[0]: named[1], named[1]: named[0]}
        return self._rendezvous.unequal(named[0], named[1])

    def _named(self, nodes: Collection[str]) -> list[Launcher] | str:
        """The members of these names (or node ranks), or why there is no such one."""
        found: list[Launcher] = []
        for name in nodes:
            table = self._rendezvous.placements
            named = [one for one, at in table.items() if name in (one.node, str(at.node_rank))]
            if not named:
                return (
                    f"{name} is no node of this job; it has {fold_nodes(sorted({one.node for one in table}))}"
                )
            if len(named) > 1:
                return f"{len(named)} launchers run on {name}; give their node ranks"
            found += named
        return found

    def _peers(self, launchers: Collection[Launcher]) -> tuple[int, ...]:
        found = (self._rendezvous.peer(launcher) for launcher in launchers)
        return tuple(sorted(peer for peer in found if peer is not None))
