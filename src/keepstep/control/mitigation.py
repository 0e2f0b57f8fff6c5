"""What is done about slowdowns while they last: the job's micro-batches go to the replicas that are fast (remedy S2).

Measures now and then how long each replica takes for a micro-batch, has the planner say what pays, orders it of the
job's first rank, notes what it was expected to do and what it did, and takes it back when the cause is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from keepstep.control.cluster import Node
from keepstep.control.desk import Desk
from keepstep.control.profiles import iterations_of
from keepstep.control.rendezvous import MOST_RANKS
from keepstep.core.incident import Action
from keepstep.core.microbatches import Split, equal_shares, fits, objection
from keepstep.core.ranges import fold_ranks
from keepstep.wire.messages import MOST_REPLICAS, Profile, Shares, Splits

if TYPE_CHECKING:
    from keepstep.control.slow_case import SlowCase
    from keepstep.mitigate import Planner, Replicas

Mode = Literal["off", "advise", "auto"]
MICROBATCHES = "S2, micro-batches"

_LEAST_STEPS = 4  # looked at
_MOST_STEPS = 12
_LOOK_S = 2.0  # between looks, and as many steps as are looked at
_WATCH_S = 10.0  # the same while nothing is to be done
_BETWEEN_S = 0.5
_AGAIN_S = 1.0  # an order that shows no effect is given again
_LATE_STEPS, _LATE_S = 16, 30.0  # an order without effect has failed
_ADJUST = 0.04  # of the iteration time: other shares would be so much better
_EVEN = 0.025  # the same of equal shares, at most: the cause is gone
_LOOKS = 2  # one after the other that say so


class Mitigation:
    """Of one job. ``incarnation``: the job's; ``standstill``: why nothing can be ordered now, "" when it can."""

    def __init__(
        self, desk: Desk, mode: Mode, incarnation: Callable[[], int], standstill: Callable[[], str]
    ) -> None:
        self.question: int | None = None  # that is open
        self._desk, self._mode = desk, mode
        self._incarnation, self._standstill = incarnation, standstill
        self._splits: dict[int, Split] = {}
        self._told_of = 0  # the incarnation that they are of
        self._planner: Planner | None = None
        self._ordered: Shares | None = None  # that has not been seen in force
        self._ordered_s = self._ordered_step = 0.0
        self._again_s = 0.0
        self._expected: Action | None = None  # whose effect is still to be seen
        self._counted_s: float | None = None  # up to when savings are
        self._looked_s = 0.0
        self._looked_step = -1
        self._next_s = 0.0
        self._even_looks = self._unfit_looks = 0
        self._cases: Sequence[SlowCase] = ()

    def told(self, node: Node, message: Splits) -> None:
        """How ranks of a node divide micro-batches."""
        for split in message.ranks:
            home = self._desk.cluster.home(split.rank)
            possible = not objection(split.count, split.replicas, split.multiple_of, split.at_most)
            sane = split.replica < split.replicas <= MOST_REPLICAS and 0 < split.share <= split.count
            if not (possible and sane and split.rank < MOST_RANKS and home in (None, node)):
                continue
            if split.incarnation > self._told_of:  # perhaps before the controller knows that it has begun
                self._told_of = split.incarnation
                self._splits.clear()
            if split.incarnation == self._told_of:
                self._splits[split.rank] = split

    def begin_again(self) -> None:
        """The job was formed anew: its shares are equal."""
        if self._told_of < self._incarnation():
            self._splits.clear()
        self._looked_step = -1
        self._ordered, self.question, self._expected, self._counted_s = None, None, None, None
        self._even_looks = self._unfit_looks = 0

    @property
    def in_force(self) -> bool:
        """Whether replicas have shares that were ordered, and are not equal."""
        split = next(iter(self._splits.values()), None)
        if split is None or not split.number or self._told_of != self._incarnation():
            return False
        return len({one.share for one in self._splits.values()}) > 1

    def tick(self, cases: Sequence[SlowCase], now_s: float) -> None:
        """Time passes. ``cases``: the slowdowns that are open."""
        if self._mode == "off":
            return
        self._cases = [case for case in cases if case.incident is not None]
        self._tick_order(now_s)
        if (
            self.question is not None
            or self._ordered is not None
            or now_s < self._next_s
            or self._standstill()
        ):
            return
        self._next_s = now_s + _BETWEEN_S  # what follows looks at every rank
        if not self._cases and not self.in_force:
            if self._planner is not None:
                self._planner.over(now_s)
            return
        if why := self._missing_splits():
            self._leave_out(why)
            return
        first = self._first_step()
        newest = self._desk.cluster.newest_step
        pause_s = _WATCH_S if self.in_force else _LOOK_S
        if newest - first + 1 < _LEAST_STEPS or newest < self._looked_step + _LEAST_STEPS:
            return
        if now_s - self._looked_s < pause_s and self._looked_step >= first:
            return
        self._looked_s, self._looked_step = now_s, newest
        self.question = self._desk.ask_profiles(max(first, newest - _MOST_STEPS + 1), newest, now_s)

    def profiles(self, answers: Sequence[Profile], now_s: float) -> None:
        """What the agents were asked for."""
        self.question = None
        rows = iterations_of(answers)
        if self._missing_splits() or not len(rows):
            return
        from keepstep.core.iteration_table import between, column  # numpy is not in the controller's start
        from keepstep.mitigate import measure

        rows = between(rows, self._first_step(), 1 << 30)
        replicas = measure(rows, self._splits, self._desk.cluster.groups)
        if replicas is None:
            return
        import numpy as np

        self._decide(replicas, float(np.median(column(rows, "duration_s"))), now_s)

    # --- deciding -------------------------------------------------------------------------------------------------

    def _decide(self, replicas: Replicas, iteration_s: float, now_s: float) -> None:
        split = next(iter(self._splits.values()))
        equal = equal_shares(split.count, split.replicas, split.multiple_of)
        best = replicas.best(split.multiple_of, split.at_most)
        if self.in_force:
            self._watch(replicas, equal, best, iteration_s, now_s)
        else:
            self._consider(replicas, equal, best, iteration_s, now_s)

    def _consider(
        self, replicas: Replicas, equal: Sequence[int], best: Sequence[int], iteration_s: float, now_s: float
    ) -> None:
        """Nothing is done yet: whether shares that fit the replicas' speeds pay."""
        from keepstep.mitigate import Planner, Remedy

        incident = next((one.incident for one in self._cases if one.incident is not None), None)
        if incident is None or not incident.iteration_before_s:
            return
        planner = self._planner = self._planner or Planner()
        equal_s, best_s = replicas.iteration_s(equal), replicas.iteration_s(best)
        steps = max(self._desk.cluster.newest_step - (incident.onset_step or 0), 0)
        chosen = planner.look(
            *(now_s, now_s - steps * iteration_s, incident.iteration_before_s, iteration_s, equal_s),
            {MICROBATCHES: Remedy(MICROBATCHES, 0.0, best_s)},
        )
        if chosen is None:
            return
        action = Action(MICROBATCHES, chosen.cost_s, f"{_told(best)}; expected {_effect(equal_s, best_s)}")
        if self._mode == "advise":
            planner.refused(MICROBATCHES)
            self._note(replace(action, name=f"advised: {MICROBATCHES}"))
        else:
            self._treat(best, action, now_s)

    def _watch(
        self, replicas: Replicas, equal: Sequence[int], best: Sequence[int], iteration_s: float, now_s: float
    ) -> None:
        """Shares that were ordered are in force: whether they still fit, and what they do."""
        equal_s, best_s = replicas.iteration_s(equal), replicas.iteration_s(best)
        if self._counted_s is not None:
            saved_s = max(now_s - self._counted_s, 0.0) * (equal_s / iteration_s - 1)
            for case in self._cases[:1]:
                case.saved(saved_s)
        self._counted_s = now_s
        if (expected := self._expected) is not None:
            self._expected = None
            measured = f"{expected.detail}; measured {_effect(equal_s, iteration_s)}"
            self._note(replace(expected, detail=measured), expected)
        even, unfit = (
            equal_s <= (1 + _EVEN) * best_s,
            best_s < (1 - _ADJUST) * replicas.iteration_s(replicas.shares),
        )
        self._even_looks = self._even_looks + 1 if even else 0
        self._unfit_looks = self._unfit_looks + 1 if unfit and not even else 0
        if self._even_looks >= _LOOKS:
            self._order(equal, now_s)
            self._note(Action("S2 is taken back", 0.0, "the replicas are equally fast again"))
        elif self._unfit_looks >= (_LOOKS if all(case.treated for case in self._cases) else 1):
            expects = _effect(replicas.iteration_s(replicas.shares), best_s)
            self._treat(best, Action(MICROBATCHES, 0.0, f"{_told(best)}; expected {expects}"), now_s)

    def _treat(self, shares: Sequence[int], action: Action, now_s: float) -> None:
        self._order(shares, now_s)
        self._expected = action
        for case in self._cases:
            case.treated = True
        self._note(action)

    def _note(self, action: Action, instead: Action | None = None) -> None:
        for place, case in enumerate(case for case in self._cases if case.treated or not self.in_force):
            case.acted(action, instead, say=place == 0)

    # --- ordering -------------------------------------------------------------------------------------------------

    def _order(self, shares: Sequence[int], now_s: float) -> None:
        split = next(iter(self._splits.values()))
        if not fits(shares, split.count, split.replicas, split.multiple_of, split.at_most):
            return
        self._even_looks = self._unfit_looks = 0
        self._counted_s = None
        number = self._desk.hold_number(now_s)
        self._ordered = Shares(number, 0, self._incarnation(), tuple(shares))
        self._ordered_s = self._again_s = now_s
        self._ordered_step = self._desk.cluster.newest_step
        self._send(now_s)

    def _tick_order(self, now_s: float) -> None:
        order = self._ordered
        if order is None:
            return
        if all(split.number == order.number for split in self._splits.values()) and self._splits:
            self._ordered = None
            self._settled(now_s)
        elif (
            now_s - self._ordered_s > _LATE_S
            and self._desk.cluster.newest_step > self._ordered_step + _LATE_STEPS
        ):
            self._ordered = None
            if self._planner is not None:
                self._planner.refused(MICROBATCHES)
            self._note(Action("S2 has failed", None, "the ranks did not take the shares that were ordered"))
        elif now_s - self._again_s >= _AGAIN_S:
            self._send(now_s)

    def _send(self, now_s: float) -> None:
        assert self._ordered is not None
        self._again_s = now_s
        home = self._desk.cluster.home(self._ordered.rank)
        if home is not None:
            self._desk.order(self._ordered, home.rank)

    def _settled(self, now_s: float) -> None:
        """All ranks divide their micro-batches as was ordered."""
        if self.in_force:
            if self._planner is not None:
                self._planner.applied(MICROBATCHES, 0.0)
            return
        step = max(split.step for split in self._splits.values())
        for case in self._cases:
            if case.treated:
                case.treated = False
                case.cured(step, now_s)

    def _leave_out(self, why: str) -> None:
        """Say in the incident why nothing is done, once the ranks had the time to tell."""
        left_out = Action("none", None, f"{MICROBATCHES}: {why}")
        for case in self._cases:
            incident = case.incident
            if incident is None or incident.actions:
                continue
            if self._desk.cluster.newest_step > (incident.detected_step or 0) + _LATE_STEPS:
                case.acted(left_out, say=False)

    # --- what is known --------------------------------------------------------------------------------------------

    def _missing_splits(self) -> str:
        """Why shares cannot be ordered; "": they can."""
        cluster, splits = self._desk.cluster, self._splits
        absent = [rank for rank in cluster.node_of if rank not in splits]
        if absent or not splits or self._told_of != self._incarnation():
            return (
                f"ranks {fold_ranks(absent)} do not divide micro-batches by a session"
                if absent
                else "no rank"
            )
        first = next(iter(splits.values()))
        alike = {
            (one.count, one.replicas, one.multiple_of, one.at_most, one.number) for one in splits.values()
        }
        if len(alike) > 1 or first.replicas < 2:
            return "the ranks divide micro-batches in different ways"
        return ""

    def _first_step(self) -> int:
        """The first step that says how fast replicas are now: with these shares, and in this slowdown."""
        first = max((split.step for split in self._splits.values()), default=0) + 1
        onsets = [case.incident.onset_step or 0 for case in self._cases if case.incident is not None]
        return max([first, *(onset + 1 for onset in onsets)])


def _effect(before_s: float, after_s: float) -> str:
    return f"{before_s:.3g} s → {after_s:.3g} s an iteration (×{before_s / after_s:.2f} as fast)"


def _told(shares: Sequence[int]) -> str:
    """Shares in a line: ``13 to replicas 0-2, 7 to replica 3``."""
    by_share: dict[int, list[int]] = {}
    for replica, share in enumerate(shares):
        by_share.setdefault(share, []).append(replica)
    told = [
        f"{share} to replica{'s' if len(those) > 1 else ''} {fold_ranks(those)}"
        for share, those in sorted(by_share.items(), reverse=True)
    ]
    return ", ".join(told[:6]) + (", …" if len(told) > 6 else "")
