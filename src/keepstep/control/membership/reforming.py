"""All nodes begin again together: who has to end its workers, who is lost, and when the next incarnation is placed.

Pure: what launchers say and the time in, orders out. The members are the launchers of the rank table; ``rendezvous``
keeps it, and makes the next one. One recovery at a time: a failure of an incarnation that is being ended already is
part of it, one of the next incarnation begins another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from keepstep.control.effects import Tell
from keepstep.control.membership.rendezvous import Launcher, Placed, Rendezvous
from keepstep.control.membership.restart_budget import Spending
from keepstep.control.settings import Settings
from keepstep.core.ranges import fold_nodes

_STALL_S = 1.0  # a tick this late means that we slept, not the launchers
_LOST_CODE = 1  # of a job whose first failure was that of a node
_BY_HAND = "an operator ordered it"
_BARRED_S = 600.0
_MOST_SHARE = 10  # more than a tenth gone together: the network, or us


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long is waited for what, in seconds."""

    lost_s: float = 3.0  # unheard for so long: lost
    away_s: float = (
        10.0  # the same of one that this controller has never heard, and when many are gone at once
    )
    halt_s: float = 60.0  # for workers to be ended, from the order on
    join_s: float = 600.0  # for a spare
    shrink_s: float = 30.0  # the same where the job may go on with fewer nodes
    grows: bool = True  # nodes that come later can be given the state of others

    @classmethod
    def of(cls, settings: Settings) -> Waiting:
        """As the command line says."""
        times = (settings.lost_s, settings.away_s, settings.halt_s, settings.join_s, settings.shrink_s)
        return cls(*times, grows=settings.backups > 0)


@dataclass(frozen=True, slots=True)
class HaltThese:
    """Tell these launchers to end their workers of this incarnation, and to say so."""

    launchers: tuple[Launcher, ...]
    incarnation: int
    suspend: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The nodes of these launchers are lost."""

    launchers: tuple[Launcher, ...]


@dataclass(frozen=True, slots=True)
class Exclude:
    """This launcher plays no part any more: end it."""

    launcher: Launcher
    reason: str


@dataclass(frozen=True, slots=True)
class Renew:
    """There is a new rank table; tell who plays what."""

    placed: Placed


@dataclass(frozen=True, slots=True)
class End:
    """No more restarts, or nobody to go on with."""

    exit_code: int
    reason: str
    by_operator: bool = False


@dataclass(frozen=True, slots=True)
class Lapsed:
    """An exchange or replacement that nobody waits for will not be: tell who ordered it why."""

    why: str


Order = HaltThese | Lost | Exclude | Renew | Lapsed | End | Tell


@dataclass(frozen=True, slots=True)
class _Cause:
    exit_code: int
    text: str


class Reforming:
    """One controller's view of the recovery, soft state: after a restart launchers say again what they failed or ended.

    ``heard(node_rank, now_s)``: whether the node's agent speaks, which ends with its launcher. ``spending``: what the
    budgets of the job say.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        waiting: Waiting,
        heard: Callable[[int, float], bool],
        spending: Spending,
    ) -> None:
        self._rendezvous = rendezvous
        self._waiting = waiting
        self.spending = spending
        self._heard = heard
        self._state: Literal["running", "halting", "waiting", "suspended", "over"] = "running"
        self._hold = False  # an operator wants it suspended
        self._asked = ""  # set if this re-forming was ordered, not caused by a failure: by whom
        self._exchange: Mapping[
            Launcher, Launcher
        ] = {}  # and who is to take whose place in it, by who has it
        self.exchanged = False  # the last recovery did that
        self._newest = 0  # highest incarnation that a launcher has told of
        self._ended = 0  # highest incarnation that some launcher has confirmed stopped
        self._away: dict[Launcher, float] = {}  # members without a connection, since when
        self._unheard: set[Launcher] = set()  # of them, those that this controller has never heard
        self._missing: set[Launcher] = set()  # members when this controller began, until they come
        self._orphaned: set[Launcher] = set()  # whose agents said that they are gone
        self._done: set[Launcher] = set()  # members whose workers have ended well
        self._open: set[Launcher] = set()  # members that have not said yet that they have ended
        self._lost: set[Launcher] = set()  # members whose places are vacant
        self._halted: dict[Launcher, int] = {}  # free port, by launcher that can be placed
        self._unfit: dict[Launcher, str] = {}  # members whose nodes should be replaced, and why
        self._untried: set[Launcher] = set()  # newcomers with which the job has not trained yet
        self._barred: dict[str, float] = {}  # nodes that are not taken in again, and until when
        self._rigid: dict[Launcher, str] = {}  # members that cannot go on in a job of another size, and why
        self._was_rigid = (
            ""  # the same of the last recovery, until the job trains: who has just come holds nothing yet
        )
        self._cause: _Cause | None = None
        self._vacated = False  # members were lost that may be all that was waited for
        self._deadline_s = 0.0
        self._vacant_since_s: float | None = None  # since when a spare is waited for
        self._patience_s = 0.0  # and for how long
        self._ticked_s: float | None = None

    @property
    def incarnation(self) -> int:
        """The one that runs, or is being ended."""
        return max(self._newest, self._rendezvous.incarnation)

    @property
    def restarts(self) -> int:
        """How often the job has begun again; counted by incarnations, so that every controller counts alike."""
        return self.incarnation - self._rendezvous.pauses

    @property
    def under_way(self) -> bool:
        """Between a failure, or an operator's order, and the next placement."""
        return self._state in ("halting", "waiting", "suspended")

    @property
    def suspended(self) -> bool:
        """No worker runs, and none is started before `resume`."""
        return self._state == "suspended"

    def pause(
        self,
        now_s: float,
        *,
        hold: bool,
        why: str = _BY_HAND,
        exchange: Mapping[Launcher, Launcher] | None = None,
        unfit: Mapping[Launcher, str] | None = None,
    ) -> list[Order]:
        """All are to begin again without a failure.

        ``hold``: not before `resume`; ``exchange``: who takes whose place, by who has it; ``unfit``: spares in their
        places, and why.
        """
        if self._state == "running":
            self._asked, self._hold, self._exchange = why, hold, exchange or {}
            self._unfit.update(unfit or {})
            return self._begin(now_s)
        if not hold or not self.under_way:
            return []
        self._hold = True  # what has halted already is told again, so that it says so to a new controller
        told = [self._halt((*self._rendezvous.placements, *self._rendezvous.spares))]
        return [*told, *self._advance(now_s)]

    def resume(self, now_s: float) -> list[Order]:
        """An operator has the job go on."""
        if not self.suspended:
            return []
        self._state, self._hold, self._vacant_since_s = "halting", False, None
        self._deadline_s = now_s + self._waiting.halt_s
        return self._advance(now_s)

    def restored(self, former: Launcher | None = None) -> None:
        """An earlier controller placed the members; they have a while to come back, from the first tick on.

        ``former``: hosted it, and was away for a lease already.
        """
        self._missing = set(self._rendezvous.placements)
        self._unheard = self._missing - {former}

    def here(self, launcher: Launcher, incarnation: int, now_s: float) -> list[Order]:
        """It has joined; ``incarnation``: of the placement that it has, -1 for none."""
        self._away.pop(launcher, None)
        self._missing.discard(launcher)
        self._unheard.discard(launcher)
        self._orphaned.discard(launcher)
        if not self._rendezvous.max_restarts and launcher in self._rendezvous.placements:
            self._newest = max(self._newest, incarnation)  # the launcher of one node begins again by itself
            if self._state == "halting":  # and has done so before it read the order
                return [self._halt((launcher,))]
        if self._state == "over" or not self._rendezvous.max_restarts:
            return []
        if launcher not in self._rendezvous.placements:
            # Cut off and replaced, it may still run what is over; a spare says which port is free.
            return [self._halt((launcher,))] if incarnation >= 0 or self.under_way else []
        if incarnation > self.incarnation:  # the table is older than the job
            self._newest = incarnation
            return self._begin(now_s)
        if not self.under_way:
            return []
        self._lost.discard(launcher)
        self._halted.pop(launcher, None)
        self._open.add(launcher)
        self._deadline_s = max(self._deadline_s, now_s + self._waiting.halt_s)
        return [self._halt((launcher,))]

    def gone(self, launcher: Launcher, now_s: float) -> None:
        """Its connection has gone."""
        if launcher in self._rendezvous.placements:
            self._away.setdefault(launcher, now_s)
        self._halted.pop(launcher, None)
        if self.under_way and launcher in self._rendezvous.placements and launcher not in self._lost:
            self._open.add(launcher)  # whether it still lives is to be seen

    def orphaned(self, launcher: Launcher) -> None:
        """Its agent goes because it is gone."""
        self._orphaned.add(launcher)

    def failed(
        self, launcher: Launcher, incarnation: int, exit_code: int, text: str, now_s: float
    ) -> list[Order]:
        """Workers of a member have failed."""
        if launcher not in self._rendezvous.placements or incarnation < self.incarnation:
            return []
        if self._cause is None:
            self._cause = _Cause(exit_code or _LOST_CODE, f"node {launcher.node} failed: {text}")
        return self._begin(now_s)

    def ended(self, launcher: Launcher) -> None:
        """All workers of a member have ended well; nothing is missed when it goes."""
        if not self.under_way:
            self._done.add(launcher)

    def halted(
        self,
        launcher: Launcher,
        incarnation: int,
        free_port: int,
        now_s: float,
        suspended: bool = False,
        unfit: str = "",
        rigid: str = "",
    ) -> list[Order]:
        """A launcher has no workers any more.

        ``suspended``: because an operator wanted that. ``unfit``: why none should begin again on its node. ``rigid``:
        why they cannot in a job of another size.
        """
        self._ended = max(self._ended, incarnation)
        if incarnation < self.incarnation or self._state == "over":
            return []
        orders: list[Order] = []
        if launcher in self._rendezvous.placements:
            # Ordered by an earlier controller, or a node that was cut off and ended by itself.
            if suspended and self._state == "running":
                self._asked, self._hold = _BY_HAND, True
            orders = self._begin(now_s)
            self._lost.discard(launcher)
            self._open.discard(launcher)
            if unfit:
                self._unfit[launcher] = unfit
            if rigid:
                self._rigid[launcher] = rigid
        self._halted[launcher] = free_port
        return [*orders, *self._advance(now_s)]

    @property
    def is_untried(self) -> bool:
        """Whether it is not known yet that the job trains: with newcomers, or again in the size that it has to have."""
        return bool(self._untried or self._was_rigid) and self._state == "running"

    def trains(self) -> None:
        """All ranks have made a step."""
        self._untried.clear()
        self._was_rigid = ""

    def over(self) -> None:
        """The job ends; nothing is begun any more."""
        self._state = "over"

    def tick(self, now_s: float) -> list[Order]:
        """Time passes."""
        if self._ticked_s is None:
            self._away.update(dict.fromkeys(self._missing, now_s))
        elif now_s - self._ticked_s > _STALL_S:
            self._away = dict.fromkeys(self._away, now_s)
            self._deadline_s += now_s - self._ticked_s
        self._ticked_s = now_s
        if self._barred:
            self._barred = {node: until_s for node, until_s in self._barred.items() if now_s < until_s}
            self._rendezvous.barred = frozenset(self._barred)
        if self._state == "over" or not self._rendezvous.max_restarts:
            return []
        if lost := self._newly_lost(now_s):
            self._vacated = True
            return self._vacate(lost, now_s)
        late = self._vacant_since_s is not None and now_s - self._vacant_since_s >= self._patience_s
        return self._advance(now_s) if self._vacated or late else []

    def _begin(self, now_s: float) -> list[Order]:
        if self._state != "running":
            return []
        self._state = "halting"
        self._deadline_s = now_s + self._waiting.halt_s
        self._done.clear()
        self._halted.clear()
        self._lost.clear()
        self._rigid.clear()
        self._vacant_since_s = None
        self._open = set(self._rendezvous.placements)
        return [self._halt((*self._rendezvous.placements, *self._rendezvous.spares))]

    def _halt(self, launchers: tuple[Launcher, ...]) -> HaltThese:
        # where nodes change places these are to be others, not the processes
        fresh = bool(self._asked) and not (self._hold or self._exchange or self._unfit)
        return HaltThese(launchers, self.incarnation, self._hold, fresh)

    def _newly_lost(self, now_s: float) -> list[Launcher]:
        lost: list[Launcher] = []
        waiting, table = self._waiting, self._rendezvous.placements
        many = len(self._away) > max(1, len(table) // _MOST_SHARE)
        for launcher, since_s in self._away.items():
            if launcher in self._lost or (launcher in self._done and not self.under_way):
                continue
            patience_s = waiting.away_s if many or launcher in self._unheard else waiting.lost_s
            orphaned = launcher in self._orphaned
            if not orphaned and (
                now_s - since_s < patience_s or self._heard(table[launcher].node_rank, now_s)
            ):
                continue
            lost.append(launcher)
        if self.under_way and now_s >= self._deadline_s:
            lost += self._open.difference(lost)
        return lost

    def _vacate(self, lost: Iterable[Launcher], now_s: float) -> list[Order]:
        lost = sorted(lost, key=lambda launcher: self._rendezvous.placements[launcher].node_rank)
        if self._cause is None:
            self._cause = _Cause(_LOST_CODE, f"{_nodes(lost)} lost")
        for launcher in lost:
            self.spending.lost(launcher.node, self.incarnation, now_s)
        orders = self._begin(now_s)
        self._lost.update(lost)
        self._open.difference_update(lost)
        return [Lost(tuple(lost)), *orders]

    def _advance(self, now_s: float) -> list[Order]:
        self._vacated = False
        if not self.under_way or self._open:
            return []
        if self._hold:
            told = "" if self.suspended else "all nodes are suspended by an operator"
            self._state, self._deadline_s = "suspended", math.inf
            return [Tell(told)] if told else []
        rendezvous = self._rendezvous
        cause = self._cause or _Cause(_LOST_CODE, "a recovery was under way when the controller began again")
        if self._asked:
            cause = _Cause(_LOST_CODE, self._asked)
            self.spending.forget(self.incarnation)
        elif self.restarts >= rendezvous.max_restarts:
            return self._end(
                cause.exit_code, f"{cause.text}; --max-restarts {rendezvous.max_restarts} are used up"
            )
        elif refused := self.spending.refused(self.incarnation):
            blamed = [
                one for one in rendezvous.placements if one.node == refused.node and one not in self._lost
            ]
            if not self._replaceable(blamed):
                return self._end(cause.exit_code, refused.reason)
            self._unfit.update(dict.fromkeys(blamed, refused.reason))
        excluded = [one for one in self._unfit if one in rendezvous.placements and one not in self._lost]
        if excluded and not self._replaceable(excluded):
            if self._is_awaited(rendezvous.spares, now_s):
                return []
            excluded = []
        vacant = sorted(self._lost, key=lambda launcher: rendezvous.placements[launcher].node_rank)
        if len(vacant) == len(rendezvous.placements):
            return self._end(cause.exit_code, f"{cause.text}; all nodes are lost")
        if self._asked and self._grows and self._is_awaited(rendezvous.newcomers, now_s):
            return []
        before = dict(rendezvous.placements)
        retreat = [one for one in self._untried if one in before and one not in self._lost]
        retreat = [] if self._asked or self._stiff else retreat
        placed = self._renew([*vacant, *retreat], shrink=True) if retreat else None
        if placed is None:
            retreat = []
            placed = self._renew([*vacant, *excluded])
        if placed is None and excluded:  # its node is better than none
            excluded = []
            placed = self._renew(vacant)
        if placed is None:
            if self._is_awaited(rendezvous.spares, now_s):
                return []
            since_s = now_s if self._vacant_since_s is None else self._vacant_since_s
            if self._may_shrink and now_s - since_s >= self._waiting.shrink_s:
                placed = self._renew(vacant, shrink=True)
        if placed is None:
            return self._wait(cause, vacant, now_s)
        excluded = [one for one in excluded if one not in rendezvous.placements]
        for launcher in retreat:
            self._barred[launcher.node] = now_s + _BARRED_S
        self.exchanged = bool(self._exchange) and all(
            (place := rendezvous.placements.get(taker)) is not None
            and place.node_rank == before[holder].node_rank
            for holder, taker in self._exchange.items()
        )
        told = self._told(cause, [*vacant, *excluded], retreat, len(before))
        newcomers = (
            rendezvous.placements.keys() - before.keys() if len(rendezvous.placements) > len(before) else ()
        )
        self._untried = set(newcomers)
        gone = [Exclude(one, f"node {one.node} is excluded: {self._unfit[one]}") for one in excluded]
        self._unfit.clear()
        self._was_rigid = next(iter(self._rigid.values()), self._was_rigid)
        self._state, self._cause, self._asked, self._exchange = "running", None, "", {}
        for launcher in (*vacant, *excluded):
            self._away.pop(launcher, None)
            self._unheard.discard(launcher)
            self._orphaned.discard(launcher)
        self._lost.clear()
        self._halted.clear()
        return [Renew(placed), *gone, Tell(told)]

    def _renew(self, lost: list[Launcher], *, shrink: bool = False) -> Placed | None:
        rendezvous = self._rendezvous
        # A leader before us may have ended one that it never placed: its number is spent, but it was no restart.
        unplaced = max(0, self._ended - self.incarnation)
        incarnation = self.incarnation + unplaced + 1
        pauses = rendezvous.pauses + unplaced + bool(self._asked)
        grow = self._grows and not shrink
        exchange = (
            self._exchange if not lost and self._exchange.keys() <= rendezvous.placements.keys() else None
        )
        return rendezvous.renew(
            *(lost, self._halted, incarnation, pauses), shrink=shrink, grow=grow, exchange=exchange
        )

    def _is_awaited(self, spares: Iterable[Launcher], now_s: float) -> bool:
        """Whether one of these has been asked to halt, and will answer."""
        self._vacated = now_s < self._deadline_s and any(spare not in self._halted for spare in spares)
        return self._vacated

    @property
    def _stiff(self) -> str:
        """Why a job of another size cannot go on with what its ranks hold."""
        return next((why for one, why in self._rigid.items() if one not in self._lost), self._was_rigid)

    @property
    def _may_shrink(self) -> bool:
        return self._rendezvous.least < len(self._rendezvous.placements) and not self._stiff

    @property
    def _grows(self) -> bool:
        return self._waiting.grows and not self._stiff

    def _replaceable(self, unfit: list[Launcher]) -> bool:
        """Whether there are spares for these and all lost ones; who hosts the controller cannot be spared."""
        rendezvous = self._rendezvous
        ready = sum(spare in self._halted for spare in rendezvous.spares)
        hosts = any(rendezvous.hosts_controller(one) for one in unfit)
        return bool(unfit) and not hosts and len(unfit) + len(self._lost) <= ready

    def _wait(self, cause: _Cause, vacant: list[Launcher], now_s: float) -> list[Order]:
        waiting, count = self._waiting, len(self._rendezvous.placements)
        if self._vacant_since_s is None:
            self._state, self._vacant_since_s = "waiting", now_s
            self._patience_s = waiting.shrink_s if self._may_shrink else waiting.join_s
            told = f"{cause.text}; waits for the other nodes: no spare is here, {waiting.join_s:g} s at most"
            rest, least = count - len(vacant), self._rendezvous.least
            if self._may_shrink and rest >= least:
                wait = f"waits {waiting.shrink_s:g} s for a spare"
                told = f"{cause.text}; {wait}, then goes on with {rest} of {count} nodes"
            elif least < count:
                told += f"; it does not go on with fewer nodes: {self._stiff or f'--nnodes says {least} at least'}"
            return [Tell(told)]
        if now_s - self._vacant_since_s < waiting.join_s:
            return []
        return self._end(
            cause.exit_code, f"{cause.text}; no spare came within {waiting.join_s:g} s for {_nodes(vacant)}"
        )

    def _end(self, exit_code: int, reason: str) -> list[Order]:
        self._state = "over"
        return [End(exit_code, reason)]

    def _told(self, cause: _Cause, vacant: list[Launcher], retreat: list[Launcher], before: int) -> str:
        most, now = self._rendezvous.max_restarts, len(self._rendezvous.placements)
        replaced = [one for one in vacant if now >= before]
        by = f"; {_nodes(replaced)} replaced" if replaced else ""
        by += f"; the job did not begin with {_nodes(retreat)}, left out for now" if retreat else ""
        by += f"; {'fewer' if now < before else 'more'} nodes, {now} after {before}" if now != before else ""
        if self._exchange:
            moved = sorted(self._exchange)
            by += f"; {_nodes(moved)} {'exchanged' if self.exchanged else 'could not exchange'} their ranks"
        count = "" if self._asked else f", restart {self.restarts} of {most}"
        return f"{cause.text}{by}; all nodes begin again{count}"


def _nodes(launchers: Iterable[Launcher]) -> str:
    """``node gpu-1`` or ``nodes gpu-[1-2]``."""
    names = [launcher.node for launcher in launchers]
    return f"node{'s' if len(names) > 1 else ''} {fold_nodes(names)}"
