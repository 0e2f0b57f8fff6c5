"""All nodes re-form together: who has to end its workers, who is lost, and when the next incarnation is placed.

Pure: what launchers say and the time in, orders out. The members are the launchers of the rank table; ``rendezvous``
keeps it, and makes the next one. `TRANSITIONS` says which event leads where, and what is done then. One re-forming at a
time: a failure of an incarnation that is being ended already is part of it, one of the next incarnation begins another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from keepstep.control.effects import Tell
from keepstep.control.membership.absence import Absence
from keepstep.control.membership.next_table import Incarnations, NextTable, Plan, Trial
from keepstep.control.membership.reforming_orders import End, Exclude, HaltThese, Lost, Order, Renew
from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.control.membership.restart_budget import Spending, StoragePause
from keepstep.control.membership.roll_call import BY_HAND, Occasion, RollCall
from keepstep.control.membership.transitions import CONCLUSIONS, TRANSITIONS, Action, Event, State
from keepstep.control.settings import Settings
from keepstep.core.exit_codes import TEMPORARY_FAILURE
from keepstep.core.ranges import fold_nodes
from keepstep.wire.messages import Halted

_UNDER_WAY = frozenset((State.HALTING, State.WAITING, State.SUSPENDED))


class Reforming:
    """One controller's view of the re-forming that is under way, if one is.

    It is soft state: to a new controller launchers say again what has failed and what they have ended. Invariants R1 to
    R12 stand beside the fields, here and in the parts; simulations check them after each step.

    ``heard(node_rank, now_s)``: whether the node's agent speaks, which ends with its launcher. ``spending``: what the
    budgets of the job say.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        settings: Settings,
        heard: Callable[[int, float], bool],
        spending: Spending,
    ) -> None:
        self._rendezvous, self._settings, self.spending = rendezvous, settings, spending
        self._incarnations = Incarnations(rendezvous)
        self._absence = Absence(heard, settings.lost_s, settings.away_s)
        self._trial = Trial()
        self._next = NextTable(rendezvous, self._incarnations, self._trial, takes_in=settings.backups > 0)

        # Where it stands. Only `_fire` changes it, along the table.
        self.state = State.RUNNING

        # What belongs to one re-forming alone: what launchers have said in it, and what it is for. Both are renewed
        # when the next incarnation is placed.
        #
        # Invariant R1: both are blank in RUNNING, so nothing of one re-forming can be taken for a part of the next.
        self._roll, self._occasion = RollCall(), Occasion()

        # Since when a spare is waited for, and after how many seconds to look whether the job can go on without one.
        #
        # Invariant R12: a spare is waited for in WAITING, and in no other state.
        self._waits_since_s: float | None = None
        self._patience_s = 0.0

        # The next tick has to look for a conclusion: perhaps no message will come any more that leads to one.
        self._is_due = False

        self._storage = StoragePause()

        # Whether the newest placement was an exchange that was ordered, and every node has the place it was to take.
        self.exchanged = False

    @property
    def incarnation(self) -> int:
        """The incarnation that runs, or is being ended."""
        return self._incarnations.current

    @property
    def restarts(self) -> int:
        """How often the job has begun again because something failed."""
        return self._incarnations.restarts

    @property
    def under_way(self) -> bool:
        """Whether a failure or an order has ended an incarnation, and the next one is not placed yet."""
        return self.state in _UNDER_WAY

    @property
    def suspended(self) -> bool:
        """Whether an operator has suspended the job: no worker runs, and none is started before `resume`."""
        return self.state is State.SUSPENDED

    @property
    def is_untried(self) -> bool:
        """Whether it has still to be seen that the job trains: with its newcomers, or in its only possible size."""
        return self.state is State.RUNNING and bool(self._trial.newcomers or self._trial.rigid)

    # --- what happens ---------------------------------------------------------------------------------------------

    def pause(self, order: Occasion, now_s: float) -> list[Order]:
        """All nodes are to re-form by this order, though nothing has failed."""
        if self.state is State.RUNNING:
            self._occasion = order
            return self._fire(Event.SUSPEND if order.is_held else Event.ORDERED, now_s)
        if not order.is_held or not self.under_way:
            return []
        # Launchers that have halted already are told again, so that they tell a new controller of the suspension.
        self._occasion.is_held = True
        return [*self._fire(Event.SUSPEND, now_s), *self._conclude(now_s)]

    def resume(self, now_s: float) -> list[Order]:
        """An operator has a suspended job go on."""
        return [*self._fire(Event.RESUME, now_s), *self._conclude(now_s)] if self.suspended else []

    def restored(self, former: Launcher | None = None) -> None:
        """An earlier controller placed the members, which have a while to come back, counted from the first tick.

        ``former``: hosted it, and was away for a lease already.
        """
        self._absence.restored(self._rendezvous.placements, former)

    def here(self, launcher: Launcher, incarnation: int, now_s: float) -> list[Order]:
        """A launcher has joined. ``incarnation``: what it plays by the placement that it has; -1: it has none."""
        is_member = launcher in self._rendezvous.placements
        self._absence.came(launcher)
        if not self._rendezvous.max_restarts:  # the launcher of one node restarts its workers by itself
            if is_member:
                self._incarnations.told(incarnation)
            is_early = is_member and self.state is State.HALTING  # restarted before it read the order
            return [self._halt((launcher,))] if is_early else []
        if self.state is State.OVER:
            return []
        if not is_member:
            # If it was cut off and replaced, it may still run an old incarnation; a spare says which port is free.
            return [self._halt((launcher,))] if incarnation >= 0 or self.under_way else []
        if incarnation > self.incarnation:
            self._incarnations.told(incarnation)
            return self._fire(Event.AHEAD, now_s)
        return self._fire(Event.RETURNED, now_s, launcher)

    def gone(self, launcher: Launcher, now_s: float) -> None:
        """The last connection of a launcher has gone."""
        is_member = launcher in self._rendezvous.placements
        if is_member:
            self._absence.went(launcher, now_s)
        self._roll.went(launcher, is_member=is_member)

    def orphaned(self, launcher: Launcher) -> None:
        """A launcher is gone for certain: its agent says so."""
        self._absence.orphaned.add(launcher)

    def failed(
        self, launcher: Launcher, incarnation: int, exit_code: int, text: str, now_s: float
    ) -> list[Order]:
        """Workers of a member have failed."""
        if launcher not in self._rendezvous.placements or incarnation < self.incarnation:
            return []
        self._occasion.failed(exit_code, f"node {launcher.node} failed: {text}")
        return self._fire(Event.FAILED, now_s)

    def ended(self, launcher: Launcher) -> None:
        """All workers of a member have ended well; nothing is missed when it goes."""
        if not self.under_way:
            self._absence.finished.add(launcher)

    def halted(self, launcher: Launcher, halted: Halted, now_s: float) -> list[Order]:
        """A launcher runs no workers any more."""
        self._incarnations.stopped(halted.incarnation)
        if halted.incarnation < self.incarnation or self.state is State.OVER:
            return []
        orders: list[Order] = []
        if launcher in self._rendezvous.placements:
            # An earlier controller may have told it to halt, or it was cut off and has ended its workers by itself.
            if halted.suspended and self.state is State.RUNNING:
                self._occasion = Occasion(BY_HAND, is_held=True)
            orders = self._fire(Event.HALTED, now_s)
            self._roll.answered(launcher, halted.unfit, halted.rigid)
        if self.under_way:
            self._roll.halted[launcher] = halted.free_port
        return [*orders, *self._conclude(now_s)]

    def trains(self) -> None:
        """All ranks have made a step."""
        self._trial.passed()

    def over(self) -> None:
        """The job ends: no incarnation begins any more."""
        self._fire(Event.END, 0.0)

    def tick(self, now_s: float) -> list[Order]:
        """Time passes: somebody may be lost, or has been waited for long enough."""
        self._roll.deadline_s += self._absence.tick(now_s)
        self._rendezvous.barred = self._trial.barred(now_s)
        if self.state is State.OVER or not self._rendezvous.max_restarts:
            return []
        lost = set(self._absence.lost(self._rendezvous.placements, now_s)) - self._roll.lost
        if self.under_way and now_s >= self._roll.deadline_s:
            lost |= self._roll.awaited
        if lost:
            return self._fire(Event.LOST, now_s, self._next.ranked(lost))
        since_s = self._waits_since_s
        late = since_s is not None and now_s - since_s >= self._patience_s
        return self._conclude(now_s) if self._is_due or late else []

    def _fire(self, event: Event, now_s: float, what: Any = None) -> list[Order]:
        """Follow the table of transitions. ``what``: what the event is about, for the actions."""
        transition = TRANSITIONS[self.state].get(event)
        if transition is None:
            assert event not in CONCLUSIONS, f"{event} in {self.state}"
            return []
        self.state = transition.state
        return [order for action in transition.actions for order in self._ACTIONS[action](self, what, now_s)]

    # --- what follows once all have halted ------------------------------------------------------------------------

    def _conclude(self, now_s: float) -> list[Order]:
        self._is_due = False
        if not self.under_way or self._roll.awaited:
            return []
        if (told := self._storage.waits(self._pause_s, self.incarnation, now_s)) is not None:
            self._is_due = True
            return told
        event, what = self._conclusion(now_s)
        return self._fire(event, now_s, what)

    @property
    def _pause_s(self) -> float:
        """How long storage is given to be mended before the next incarnation."""
        is_last = self.restarts >= self._rendezvous.max_restarts or self._occasion.ordered_by
        refused = is_last or self.spending.refused(self.incarnation) is not None
        return 0.0 if refused else self.spending.pause_s(self.incarnation)

    def _conclusion(self, now_s: float) -> tuple[Event, Any]:
        """Which of `CONCLUSIONS` follows from what launchers have said, and what the actions have to know of it."""
        rendezvous, roll, occasion = self._rendezvous, self._roll, self._occasion
        if occasion.is_held:
            return Event.HELD, None
        cause = occasion.cause
        blamed = {} if occasion.ordered_by else self._blamed(cause)
        if isinstance(blamed, End):
            return Event.REFUSED, blamed
        excluded = {one: why for one, why in {**roll.unfit, **blamed}.items() if one not in roll.lost}
        if excluded and not self._next.is_replaceable(excluded, roll):
            if roll.is_awaited(rendezvous.spares, now_s):
                return Event.AWAITED, None
            excluded = blamed  # an unfit node is better than none, but not one that a budget refuses
        if len(roll.lost) == len(rendezvous.placements):
            return Event.REFUSED, _without_nodes(f"{cause.reason}; all nodes are lost")
        if occasion.ordered_by and self._next.may_grow(roll) and roll.is_awaited(rendezvous.newcomers, now_s):
            return Event.AWAITED, None
        if plan := self._next.plan(roll, occasion, excluded, blamed):
            return Event.PLACED, plan
        if roll.is_awaited(rendezvous.spares, now_s):
            return Event.AWAITED, None
        waited_s = 0.0 if self._waits_since_s is None else now_s - self._waits_since_s
        may_shrink = self._next.may_shrink(roll) and waited_s >= self._settings.shrink_s
        if may_shrink and (plan := self._next.smaller(roll, occasion, blamed)):
            return Event.PLACED, plan
        if self._waits_since_s is None or waited_s < self._settings.join_s:
            return Event.SHORT, blamed
        nodes = _nodes(self._next.ranked({*roll.lost, *blamed}))
        why = f"{cause.reason}; no spare came within {self._settings.join_s:g} s for {nodes}"
        return Event.REFUSED, _without_nodes(why) if roll.lost else _for_hardware(why)

    def _blamed(self, cause: End) -> dict[Launcher, str] | End:
        """Members without which budgets let the job begin again, and why; how it ends if they do not let it.

        In the place of an unfit one another node is waited for, as in that of a lost one.
        """
        most, unfit = self._rendezvous.max_restarts, {one.node: why for one, why in self._roll.unfit.items()}
        if self.restarts >= most:
            why = f"{cause.reason}; --max-restarts {most} are used up"
            is_unfit = self.spending.node_of(self.incarnation) in unfit
            return _for_hardware(why) if is_unfit else replace(cause, reason=why)
        refused = self.spending.refused(self.incarnation, unfit)
        if refused is None:
            return {}
        members = [one for one in self._rendezvous.placements if one.node == refused.node]
        why = unfit.get(refused.node, refused.reason)
        blamed = dict.fromkeys((one for one in members if one not in self._roll.lost), why)
        if self._next.is_replaceable(blamed, self._roll) or (members and not blamed):
            return blamed
        if refused.node in unfit:
            return _for_hardware(f"{cause.reason}; {why}") if self._next.hosts(blamed) else blamed
        return replace(cause, reason=refused.reason)

    # --- what is done ---------------------------------------------------------------------------------------------

    def _call_roll(self, _: Any, now_s: float) -> list[Order]:
        self._absence.finished.clear()
        self._roll = RollCall(self._rendezvous.placements, self._occasion.unfit)
        self._roll.deadline_s = now_s + self._settings.halt_s
        return []

    def _vacate(self, lost: list[Launcher], now_s: float) -> list[Order]:
        self._occasion.lost(_nodes(lost))
        for member in lost:
            self.spending.lost(member.node, self.incarnation, now_s)
        self._roll.vacate(lost)
        self._is_due = True
        return [Lost(tuple(lost))]

    def _halt_all(self, _: Any, now_s: float) -> list[Order]:
        return [self._halt((*self._rendezvous.placements, *self._rendezvous.spares))]

    def _halt_one(self, member: Launcher, now_s: float) -> list[Order]:
        self._roll.recall(member, now_s + self._settings.halt_s)
        return [self._halt((member,))]

    def _halt(self, launchers: tuple[Launcher, ...]) -> HaltThese:
        # A restart by hand is to begin with new processes, unless it is only nodes that are to change.
        occasion = self._occasion
        fresh = bool(occasion.ordered_by) and not (occasion.is_held or occasion.exchange or self._roll.unfit)
        return HaltThese(launchers, self.incarnation, occasion.is_held, fresh)

    def _say_suspended(self, _: Any, now_s: float) -> list[Order]:
        self._roll.deadline_s, self._waits_since_s = math.inf, None
        return [Tell("all nodes are suspended by an operator")]

    def _release(self, _: Any, now_s: float) -> list[Order]:
        self._occasion.is_held = False
        self._roll.deadline_s = now_s + self._settings.halt_s
        return []

    def _look_again(self, _: Any, now_s: float) -> list[Order]:
        self._is_due = True
        return []

    def _say_waiting(self, refused: dict[Launcher, str], now_s: float) -> list[Order]:
        settings, cause = self._settings, self._occasion.cause
        self._waits_since_s = now_s
        may_shrink = self._next.may_shrink(self._roll)
        self._patience_s = settings.shrink_s if may_shrink else settings.join_s
        count, least = len(self._rendezvous.placements), self._rendezvous.least
        rest = count - len(self._roll.lost) - len(refused)
        if may_shrink and rest >= least:
            wait = f"waits {settings.shrink_s:g} s for a spare"
            return [Tell(f"{cause.reason}; {wait}, then goes on with {rest} of {count} nodes")]
        told = f"{cause.reason}; waits for the other nodes: no spare is here, {settings.join_s:g} s at most"
        if least < count:
            why = self._next.rigid(self._roll) or f"--nnodes says {least} at least"
            told += f"; it does not go on with fewer nodes: {why}"
        return [Tell(told)]

    def _give_places(self, plan: Plan, now_s: float) -> list[Order]:
        before, exchange = self._rendezvous.placements, self._occasion.exchange
        if self._occasion.ordered_by:
            self.spending.forget(self.incarnation)
        placed = self._rendezvous.renew(plan.table)
        self.exchanged = bool(exchange) and all(
            taker in plan.table and plan.table[taker].node_rank == before[holder].node_rank
            for holder, taker in exchange.items()
        )
        told = self._told(plan, len(before))
        self._trial.bar(plan.retreat, now_s)
        newcomers = plan.table.keys() - before.keys() if len(plan.table) > len(before) else ()
        self._trial.begin(newcomers, next(iter(self._roll.rigid.values()), ""))
        self._absence.keep(plan.table)
        self._roll, self._occasion, self._waits_since_s = RollCall(), Occasion(), None
        excluded = [Exclude(one, f"node {one.node} is excluded: {why}") for one, why in plan.excluded.items()]
        return [Renew(placed), *excluded, Tell(told)]

    def _told(self, plan: Plan, before: int) -> str:
        most, now = self._rendezvous.max_restarts, len(plan.table)
        replaced = [*plan.vacant, *plan.excluded] if now >= before else []
        by = f"; {_nodes(replaced)} replaced" if replaced else ""
        by += f"; the job did not begin with {_nodes(plan.retreat)}, left out for now" if plan.retreat else ""
        by += f"; {'fewer' if now < before else 'more'} nodes, {now} after {before}" if now != before else ""
        if exchange := self._occasion.exchange:
            how = "exchanged" if self.exchanged else "could not exchange"
            by += f"; {_nodes(sorted(exchange))} {how} their ranks"
        count = "" if self._occasion.ordered_by else f", restart {self.restarts} of {most}"
        return f"{self._occasion.cause.reason}{by}; all nodes begin again{count}"

    _ACTIONS: ClassVar[Mapping[Action, Callable[[Any, Any, float], list[Order]]]] = {
        Action.CALL_ROLL: _call_roll,
        Action.VACATE: _vacate,
        Action.HALT_ALL: _halt_all,
        Action.HALT_ONE: _halt_one,
        Action.SAY_SUSPENDED: _say_suspended,
        Action.RELEASE: _release,
        Action.LOOK_AGAIN: _look_again,
        Action.SAY_WAITING: _say_waiting,
        Action.GIVE_PLACES: _give_places,
        Action.END_JOB: lambda self, end, now_s: [end],
    }


def _without_nodes(reason: str) -> End:
    """The end of a job that has too few nodes to go on."""
    return End(TEMPORARY_FAILURE, reason, kind="node-lost")


def _for_hardware(reason: str) -> End:
    """The end of a job that cannot go on with a node that is broken."""
    return End(TEMPORARY_FAILURE, reason, kind="hardware")


def _nodes(launchers: Iterable[Launcher]) -> str:
    """``node gpu-1`` or ``nodes gpu-[1-2]``."""
    names = [launcher.node for launcher in launchers]
    return f"node{'s' if len(names) > 1 else ''} {fold_nodes(names)}"
