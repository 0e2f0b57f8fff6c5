"""What is done about slowdowns while they last.

Fast replicas take more of the job's micro-batches (remedy S2); nodes exchange their ranks, so that a slow link carries
little (S3, see `exchange`); spares replace slow nodes (S4, see `replacement`). How long each replica takes for a
micro-batch is measured now and then, the planner says which remedy pays, and this is ordered. The incident tells what
was expected of it and what it did; it is taken back when the cause is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from keepstep.control.incidents.case import Desk, is_traffic, new_incident, noted
from keepstep.control.incidents.locators import NO_WAITS
from keepstep.control.incidents.open_cases import OpenCases
from keepstep.control.incidents.slow_case import SlowCase
from keepstep.control.membership.reforming import Reforming
from keepstep.control.remedies.device_speeds import Devices, HealthyRanks, Look, SlowRanks, evidence_of
from keepstep.control.remedies.exchange import TOPOLOGY, Relocation
from keepstep.control.remedies.moves import Move, Moved, shares_in_words
from keepstep.control.remedies.ordered_shares import LATE_STEPS, OrderedShares
from keepstep.control.remedies.replacement import Replacement
from keepstep.control.remedies.steadiness import Steadiness
from keepstep.core.evidence import Evidence
from keepstep.core.incident import LEAST_GAIN, REPLACEMENT, Action
from keepstep.core.summary import PathProbe
from keepstep.wire.messages import Profile
from keepstep.wire.packed import iterations_of

if TYPE_CHECKING:
    from keepstep.mitigate import Planner, Remedy, Replicas

Mode = Callable[[], Literal["off", "advise", "auto"]]  # what is to be done about slowdowns now
MICROBATCHES = "S2, micro-batches"

_LEAST_STEPS, _MOST_STEPS = 2, 8  # steps that a look takes into account
_NEW_STEPS = 4  # new steps that a further look needs
# The time between looks grows with the number of ranks, up to a limit:
_LOOK_RANK_S = 0.001  # for each rank
_LOOK_S = 2.0  # limit while something may have to be done
_WATCH_S = 10.0  # limit while shares that were ordered are in force
_BETWEEN_S = 0.5  # between two checks whether a look is due
_SETTLE_S = 5.0  # wait after the job was re-formed, until the agents of its former incarnation are gone
_ADJUST = 0.04  # other shares are ordered if they shorten an iteration by this share of it
_EVEN = 0.025  # with equal shares at most this much slower than the best, the cause is gone
_LOOKS = 2  # successive looks that must agree
_SHARES_STEPS = 64  # steps after a move in which shares that fit are waited for
_SLOWER = 1.1  # least slowdown of the iteration for which ranks are blamed that nobody saw turn slow
_CHECK_UPS = 6  # looks for slow ranks after a restart, until agents know how fast the job is
_MOST_CASES = 16  # with so many open slowdowns, none is opened that the pace does not show


class Mitigation:
    """The remedies of one job. While there is a ``standstill`` of ``open_cases``, nothing can be ordered."""

    def __init__(self, desk: Desk, mode: Mode, reforming: Reforming, open_cases: OpenCases) -> None:
        self.question: int | None = None  # the open question to agents
        self._desk, self._mode = desk, mode
        self._open, self.shares = open_cases, OrderedShares(desk, reforming)
        self._planner: Planner | None = None
        self._expected: Action | None = None  # shares that were ordered, until their effect is measured
        self._counted_step: int | None = None  # savings are counted up to this step
        # Seconds of an iteration with the shares in force, and with equal ones.
        self._paces: tuple[float, float] | None = None
        self._cause_gone = False  # the replicas are equally fast again
        self._looked_s = 0.0
        self._looked_step = self._formed_step = -1
        self._next_s = 0.0
        self._even_looks = self._unfit_looks = 0
        self._cases: Sequence[SlowCase] = ()
        self._undecided = False  # a slowdown has no verdict yet
        self._slow_ranks, self._check_ups, self._healthy = SlowRanks(), 0, HealthyRanks()
        self._steadiness = Steadiness(desk)
        self._relocation, self._replacement = Relocation(desk), Replacement(desk)
        self._moves: dict[str, Move] = {one.name: one for one in (self._relocation, self._replacement)}
        self._moved: Moved | None = None  # a move that was ordered, until its effect is measured
        self._exchanged_for: SlowCase | None = None  # the slowdown for which nodes were last exchanged

    def begin_again(self, now_s: float, *, exchanged: bool = False) -> None:
        """Start over, as the job was re-formed with equal shares. ``exchanged``: with nodes in each other's places."""
        for move in self._moves.values():
            if move.begun_again():
                done = move.is_done(exchanged)
                self._settle(move, "" if done else "the job had to begin again as it was", now_s)
        self._next_s = now_s + _SETTLE_S
        self.shares.begin_again()
        self._looked_step, self._formed_step = -1, self._desk.cluster.newest_step
        self._slow_ranks, self._healthy = SlowRanks(), HealthyRanks()
        self._steadiness = Steadiness(self._desk)
        self._check_ups = _CHECK_UPS if self._formed_step >= 0 else 0
        self.question, self._expected, self._counted_step = None, None, None
        self._even_looks = self._unfit_looks = 0

    def not_moved(self, why: str, now_s: float) -> None:
        """Note that the exchange or replacement that was ordered will not be done, and why."""
        for move in self._moves.values():
            if move.begun_again():
                self._settle(move, why, now_s)

    def probed(self, question: int, probes: Sequence[PathProbe], now_s: float) -> None:
        """Take probes of paths between nodes."""
        self._relocation.probed(question, probes, now_s)

    def tick(self, cases: Sequence[SlowCase], now_s: float) -> None:
        """Let time pass. ``cases``: the slowdowns that are open."""
        if self._rests:
            return
        self._cases = [case for case in cases if case.incident is not None]
        self._undecided = len(self._cases) < len(cases)
        self._tick_order(now_s)
        self._tick_moves(now_s)
        ordered = self.shares.is_ordered or any(move.is_ordered for move in self._moves.values())
        if ordered or self.question is not None or now_s < self._next_s or self._open.standstill():
            return
        self._next_s = now_s + _BETWEEN_S  # not at each tick, as the following goes through all ranks
        missing = self.shares.missing()
        if any(case.treated for case in self._cases) and not self.shares.in_force and not missing:
            self._out_of_force()  # the job has changed its number of micro-batches
        under_treatment = self.shares.in_force or self._moved is not None
        if not self._cases and not under_treatment and (missing or not self._check_ups):
            if self._planner is not None:
                self._planner.over(now_s)
            self._take_back(now_s)
            return
        if self.shares.in_force and self._moved is None:
            self._relocation.probe(now_s)
        may_help = self._moved is not None or any(one.may_help(self._cases) for one in self._moves.values())
        if missing and not may_help:
            self._leave_out(missing)
        else:
            self._ask(now_s)

    @property
    def _rests(self) -> bool:
        """Whether nothing is done: an operator wants it so, and shares that are in force stay as they are."""
        return self._mode() == "off" or (self._mode() == "advise" and self.shares.in_force)

    def _tick_moves(self, now_s: float) -> None:
        if self._moved is not None and not self._moved.halted and self._open.standstill():
            self._moved.since_s, self._moved.halted = now_s, True  # all ranks trained until now
        self._time_move(now_s)
        self._deal_after_move(now_s)
        for move in self._moves.values():
            if why := move.tick(now_s):
                self._settle(move, why, now_s)

    def _ask(self, now_s: float) -> None:
        """Ask agents for the last iterations, if there are enough new ones."""
        first, newest = self._first_step(), self._desk.cluster.newest_step
        if newest - first + 1 < _LEAST_STEPS or first <= self._looked_step > newest - _NEW_STEPS:
            return
        most_s = _WATCH_S if self.shares.in_force else _LOOK_S
        pause_s = min(_LOOK_RANK_S * self._desk.cluster.known_ranks, most_s)
        if now_s - self._looked_s < pause_s and self._looked_step >= first:
            return
        self._looked_s, self._looked_step = now_s, newest
        since = max(first, newest - _MOST_STEPS + 1)
        self.question = self._desk.agents.ask_profiles(since, newest, now_s, since)

    def profiles(self, answers: Sequence[Profile], now_s: float) -> None:
        """Decide with the iterations that agents have sent."""
        self.question = None
        rows = iterations_of(answers)
        if not len(rows) or self._rests:
            return
        traffic = [one for answer in answers for one in answer.traffic if is_traffic(one)]
        import numpy as np

        # Imported here, as the controller starts without numpy.
        from keepstep.core.iteration_table import between, column, table_of
        from keepstep.mitigate import measure, rank_seconds, volumes

        cluster, locators = self._desk.cluster, self._desk.locators
        rows = between(rows, max(self._first_step(), self._looked_step - _MOST_STEPS + 1), 1 << 30)
        if not len(rows):
            return
        rows = table_of(rows).with_ranks_of_the_job(cluster.communicators)
        groups = cluster.transfer_groups
        evidence = Evidence(groups, cluster.node_of, after=rows)
        if not locators.waits_recorded(evidence):
            self._leave_out(NO_WAITS)
            return
        seen = next((one.healthy for one in self._cases if one.healthy is not None), None)
        if seen is not None and not self.shares.in_force:
            self._healthy.learn(seen, self.shares.splits)
        stages = self._healthy.stages or locators.stages(evidence)
        rows = locators.own_times(evidence, stages or {}, self._healthy.own_s(self.shares.splits))
        iteration_s = float(np.median(column(rows, "duration_s")))
        replicas = None if self.shares.missing() else measure(rows, self.shares.splits, groups)
        if self._moved is not None and not self._awaits_shares(self._moved, replicas):
            self._saw(self._moved, iteration_s)
        elif replicas is not None or not self.shares.in_force:
            look = Look(self._cases, traffic, replicas, 0.0, iteration_s, self.shares.splits)
            look = replace(look, slow_steps=self._steadiness.look(rows, look, self._healthy))
            if self._relocation.blames_link(self._cases):
                node_of = {rank: number for number, node in cluster.nodes.items() for rank in node.ranks}
                look = replace(look, volumes=volumes(rows, groups, node_of))
            if replicas is not None:
                look = replace(look, seconds=rank_seconds(rows, self.shares.splits), stages=stages)
            self._decide(look, now_s)

    def _awaits_shares(self, moved: Moved, replicas: Replicas | None) -> bool:
        """Whether the effect of a move shows only once shares fit again: it made them equal."""
        if (
            replicas is None
            or self.shares.in_force
            or self._desk.cluster.newest_step > moved.step + _SHARES_STEPS
        ):
            return False
        equal, best = self.shares.fitting(replicas)
        return replicas.iteration_s(best) < (1 - LEAST_GAIN) * replicas.iteration_s(equal)

    def _decide(self, look: Look, now_s: float) -> None:
        if look.replicas is not None and (self.shares.in_force or self._check_ups):
            self._name_slow_ranks(look, look.replicas, now_s)
        self._check_ups = max(self._check_ups - 1, 0)
        if look.replicas is not None and self.shares.in_force:
            self._watch(look.replicas, look.iteration_s, now_s)
            if self.shares.is_ordered:
                return
        self._consider(look, now_s)

    def _consider(self, look: Look, now_s: float) -> None:
        """Order a remedy that pays now, if any: shares that fit the replicas' speeds, or a move."""
        from keepstep.mitigate import Planner, Remedy

        incident = next((one.incident for one in self._cases if one.incident is not None), None)
        if incident is None or not incident.iteration_before_s:
            return
        planner = self._planner = self._planner or Planner()
        remedies: dict[str, Remedy] = {}
        healthy_s, iteration_s = incident.iteration_before_s, look.iteration_s
        equal_s, best_s, best = iteration_s, iteration_s, list[int]()
        if look.replicas is not None:
            equal, best = self.shares.fitting(look.replicas)
            equal_s, best_s = look.replicas.iteration_s(equal), look.replicas.iteration_s(best)
            remedies[MICROBATCHES] = Remedy(MICROBATCHES, 0.0, best_s)
        for move in self._moves.values() if self._moved is None else ():
            if remedy := move.remedy(replace(look, healthy_s=healthy_s)):
                remedies[move.name] = remedy
        steps = max(self._desk.cluster.newest_step - (incident.onset_step or 0), 0)
        began_s = now_s - steps * iteration_s
        chosen = planner.look(now_s, began_s, healthy_s, iteration_s, equal_s, remedies)
        if chosen is None:
            return
        if move := self._moves.get(chosen.name):
            self._move(move, chosen, look, now_s)
            return
        action = Action(MICROBATCHES, chosen.cost_s, shares_in_words(best), iteration_s, best_s)
        if self._mode() == "advise":
            planner.refused(MICROBATCHES)
            self._note(replace(action, name=f"advised: {MICROBATCHES}"))
        else:
            self._treat(best, action, now_s)

    def _move(self, move: Move, remedy: Remedy, look: Look, now_s: float) -> None:
        assert self._planner is not None
        action = Action(move.name, remedy.cost_s, move.told(), look.iteration_s, remedy.iteration_s)
        if self._mode() == "advise":
            self._planner.refused(move.name)
            self._note(replace(action, name=f"advised: {move.name}"))
        elif refused := move.order(now_s):
            self._planner.refused(move.name)
            self._note(Action("none", None, f"{move.name}: {refused}"))
        else:
            case = next((one for one in self._cases if move.may_help([one])), self._cases[0])
            relieved = move is self._relocation and self._relocation.blames_link(look.cases)
            saved_s = look.iteration_s - remedy.iteration_s if relieved else 0.0
            devices = Devices.of(look, self._desk.cluster.nodes.values(), saved_s)
            self._moved = Moved(move, case, action, now_s, devices)
            case.acted(action, say=True)

    def _deal_after_move(self, now_s: float) -> None:
        """Order shares after a move, which has made them equal; by the devices' speeds as measured before it."""
        moved = self._moved
        if moved is None or not moved.done or moved.devices is None:
            return
        if self.shares.missing() or self._open.standstill():
            return
        expected = moved.devices.replicas(self._desk.cluster.nodes.values(), self.shares.splits)
        moved.devices = None
        equal, best = self.shares.fitting(expected)
        equal_s, best_s = expected.iteration_s(equal), expected.iteration_s(best)
        if best_s < (1 - LEAST_GAIN) * equal_s:
            self._treat(best, Action(MICROBATCHES, 0.0, shares_in_words(best), equal_s, best_s), now_s)

    def _take_back(self, now_s: float) -> None:
        """Have nodes go back to places that they left for a cause that is gone. Call it while the job is healthy."""
        back = self._relocation.take_back(now_s)
        if back is None or self._exchanged_for is None:
            return
        told, refused = back
        if not refused:
            self._exchanged_for.acted(Action("S3 is taken back", None, told), say=True)

    def _settle(self, move: Move, failed: str, now_s: float) -> None:
        """Note that an ordered move was done, or why it has ``failed``."""
        moved, back = self._moved, move is self._relocation and self._relocation.back > 0
        if not failed and move is self._relocation:
            self._relocation.settled(now_s)
        if back:
            self._relocation.back = 0
            if self._planner is not None and not failed:
                self._planner.undone(TOPOLOGY)
        elif not failed and moved is not None:
            moved.done, moved.step = True, self._desk.cluster.newest_step
            home = self._desk.cluster.home(0)
            moved.agent = home.agent if home is not None else None
            if move is self._relocation:
                self._exchanged_for = moved.case
        elif failed:
            self._moved = None
            if self._planner is not None:
                self._planner.refused(move.name)
            stays = f"the nodes keep their places: {failed}"
            self._note(Action(f"{move.name.split(',')[0]} has failed", None, stays))

    def _saw(self, moved: Moved, iteration_s: float) -> None:
        """Note the iteration time after a move."""
        self._moved = None
        action = replace(moved.action, measured_iteration_s=iteration_s)
        if moved.pause_s is not None:
            action = replace(action, detail=f"{action.detail}; a new step after {moved.pause_s:.2g} s")
        moved.case.acted(action, moved.action, say=True)
        if self._planner is None or moved.move is self._relocation:
            return
        if action.has_helped:
            self._planner.undone(moved.move.name)  # it helped: the same remedy may be used on further nodes
        else:
            self._planner.refused(moved.move.name)

    def _time_move(self, now_s: float) -> None:
        """Measure how long a move took, up to the first step after it.

        That must be reported by a new agent: a last heartbeat of an old one may arrive after the move.
        """
        moved, home = self._moved, self._desk.cluster.home(0)
        if moved is None or home is None or not moved.done or moved.pause_s is not None:
            return
        if home.agent in (None, moved.agent) or home.beat is None:
            return
        if any(one.rank == 0 and one.step >= 0 for one in home.beat.ranks):
            moved.pause_s = moved.move.pause_s = now_s - moved.since_s
            if self._planner is not None:
                self._planner.applied(moved.move.name, moved.pause_s)

    def _watch(self, replicas: Replicas, iteration_s: float, now_s: float) -> None:
        """Note the effect of the shares in force; order others that fit better, or equal ones if the cause is gone."""
        equal, best = self.shares.fitting(replicas)
        equal_s, best_s = replicas.iteration_s(equal), replicas.iteration_s(best)
        newest = self._desk.cluster.newest_step
        self._paces = iteration_s, equal_s
        self._count(newest)
        if self._expected is not None:
            expected, self._expected = self._expected, None
            self._note(replace(expected, measured_iteration_s=iteration_s), expected)
        even, unfit = (
            equal_s <= (1 + _EVEN) * best_s,
            best_s < (1 - _ADJUST) * replicas.iteration_s(replicas.shares),
        )
        self._even_looks = self._even_looks + 1 if even else 0
        self._unfit_looks = self._unfit_looks + 1 if unfit and not even else 0
        if self._even_looks >= _LOOKS:
            self._order(equal, now_s)
            self._cause_gone = replicas.alike
            why = "the replicas are equally fast again" if replicas.alike else "equal shares are as good now"
            self._note(Action("S2 is taken back", 0.0, why))
        elif self._unfit_looks >= (_LOOKS if all(case.treated for case in self._cases) else 1):
            before_s = replicas.iteration_s(replicas.shares)
            self._treat(best, Action(MICROBATCHES, 0.0, shares_in_words(best), before_s, best_s), now_s)

    def _name_slow_ranks(self, look: Look, replicas: Replicas, now_s: float) -> None:
        """Open an incident for slow ranks that the pace does not show.

        They turned slow while shares were unequal, or before the job was re-formed: its present agents have seen no
        faster iterations.
        """
        cluster = self._desk.cluster
        open_ones = [case.incident for case in self._cases if case.incident is not None]
        blamed = {
            name
            for one in open_ones
            for culprit in one.culprits
            for name in (culprit.link.nodes if culprit.link else (culprit.node,))
        }
        culprits = self._slow_ranks.found(look, cluster.newest_step, cluster.node_of, blamed)
        if not culprits or self._undecided or len(open_ones) >= _MOST_CASES:
            return
        if self.shares.in_force != bool(open_ones):  # with equal shares the pace shows further slowdowns
            return
        equal, _ = self.shares.fitting(replicas)
        equal_s = replicas.iteration_s(equal)
        healthy_s = open_ones[0].iteration_before_s if open_ones else replicas.alike_s(equal)
        if not open_ones and equal_s < _SLOWER * (healthy_s or 0.0):
            return
        in_force = Action(MICROBATCHES, 0.0, shares_in_words(replicas.shares), None, None, look.iteration_s)
        incident = new_incident(
            self._desk,
            "slow",
            now_s,
            onset_step=min(self._slow_ranks.since[one.rank] for one in culprits if one.rank is not None),
            detected_step=cluster.newest_step,
            job_slowdown=equal_s / healthy_s if healthy_s else None,
            culprits=culprits,
            evidence=(evidence_of(culprits, look),),
            summary="replicas have unequal shares of micro-batches: the pace does not show it"
            if self.shares.in_force
            else "since the job began again: its pace before is that of other processes",
            iteration_before_s=healthy_s,
            iteration_after_s=equal_s,
            ranks_reporting=len(look.seconds),
            world_size=cluster.known_ranks,
            actions=(in_force,) if self.shares.in_force else (),
        )
        incident = noted(self._desk, incident, "verdict", now_s)
        case = SlowCase(self._desk, incident)
        self._open.slow.append(case)
        self._desk.register.publish(incident, "verdict")
        self._cases = [*self._cases, case]

    def _count(self, step: int) -> None:
        """Count what the shares in force have cost and saved up to this step, on the account of the first slowdown."""
        if self._counted_step is not None and self._paces is not None:
            for place, case in enumerate(self._cases):
                if case.treated:
                    case.treated_for(max(step - self._counted_step, 0), None if place else self._paces)
        self._counted_step = step

    def _treat(self, shares: Sequence[int], action: Action, now_s: float) -> None:
        self._order(shares, now_s)
        self._expected = action
        for case in self._cases:
            case.treated = True
        self._note(action)

    def _note(self, action: Action, instead: Action | None = None) -> None:
        cases = [case for case in self._cases if case.treated or not self.shares.in_force]
        for place, case in enumerate(cases):
            case.acted(action, instead, say=place == 0)

    # --- ordering -------------------------------------------------------------------------------------------------

    def _order(self, shares: Sequence[int], now_s: float) -> None:
        self._even_looks = self._unfit_looks = 0
        self.shares.order(shares, now_s)

    def _tick_order(self, now_s: float) -> None:
        outcome = self.shares.tick(now_s)
        if outcome == "in force":
            self._settled(now_s)
        elif outcome == "failed":
            self._expected = None
            if self._planner is not None:
                self._planner.refused(MICROBATCHES)
            self._note(Action("S2 has failed", None, "the ranks did not take the shares that were ordered"))
            if not self.shares.in_force:
                self._out_of_force()

    def _settled(self, now_s: float) -> None:
        """Note that all ranks divide their micro-batches as was ordered."""
        step = self.shares.since_step
        if self.shares.in_force:
            self._counted_step = step
            if self._planner is not None:
                self._planner.applied(MICROBATCHES, 0.0)
            return
        self._count(step)
        for case in self._cases:
            if case.treated and self._cause_gone:
                case.cured(step, now_s)
        self._out_of_force()

    def _out_of_force(self) -> None:
        """Note that shares are equal: what is still slow shows in the pace again, and may be treated again."""
        self._counted_step = None
        for case in self._cases:
            case.treated = False
        if self._planner is not None:
            self._planner.undone(MICROBATCHES)

    def _leave_out(self, why: str) -> None:
        """Say in the incident why nothing is done, once ranks had time to report their splits."""
        cannot = self._replacement.refused(self._cases)
        why = f"{MICROBATCHES}: {why}" + (f"; {REPLACEMENT}: {cannot}" if cannot else "")
        left_out = Action("none", None, why)
        for case in self._cases:
            incident = case.incident
            if incident is None or incident.actions:
                continue
            if self._desk.cluster.newest_step > (incident.detected_step or 0) + LATE_STEPS:
                case.acted(left_out, say=False)

    # --- what is known --------------------------------------------------------------------------------------------

    def _first_step(self) -> int:
        """The first step that shows the present speed of replicas: with these shares, and in this slowdown."""
        onsets = [case.incident.onset_step or 0 for case in self._cases if case.incident is not None]
        return max([self.shares.since_step + 1, self._formed_step + 1, *(onset + 1 for onset in onsets)])
