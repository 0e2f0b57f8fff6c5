"""Validations: all ranks are held at a step ahead, the suspicious ones are tested, all go on.

The hold lives only while its orders are repeated: this process's death, or a lost connection, ends it by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from statistics import median

from keepstep.control.cluster import Cluster, Node
from keepstep.control.effects import Effect, Send
from keepstep.control.incidents.agents import Agents
from keepstep.core.ranges import fold_ranks
from keepstep.core.validation import (
    RankFigures,
    RankTests,
    SlowDevice,
    Transfer,
    TransferEndpoint,
    Validation,
)
from keepstep.report.validation import of_device, of_link
from keepstep.validate.judge import best_of, cause_of, judge
from keepstep.validate.plan import transfers
from keepstep.wire.messages import LEAST_HOLD_S, Held, Hold, Measured, Release, RunTests, Validate, Validated

LEASE_S = 3.0  # a hold that is not renewed for so long ends by itself
RENEW_S = 0.5  # how often a hold is renewed
_OTHER_S = 1.2  # the part of a hold that goes into orders and figures on their way, not into tests
_LEAST_TESTS_S = 1.2  # time for tests where the last rank came late
_ROUNDS = 3  # most rounds of tests
_LEAST_ROUND_S = 1.0  # no further round begins with less time left
_ANSWER_S = 0.8  # time for figures to come after the tests
_AHEAD_S = (
    1.5  # how far ahead a hold is ordered, as heartbeats lag and orders take time; doubled at each retry
)
_AHEAD_STEPS = 2  # least steps from the newest known one to the step of the hold
_GATHER_S = 2.5  # longest wait, besides an iteration, from the first held rank to the last
_TRIES = 3  # most tries to hold all ranks at one step
MOST_RANKS = 8192  # most ranks that are tested at once

# The states of a rank's hold, as in `ring.orders.State`.
HELD, MISSED, RELEASED, UNABLE = 2, 3, 4, 5

_Told = Callable[[Validation | None, str, float], None]  # what was measured, or why nothing was; the time


class ValidationCase:
    """One validation. Either ``outcome`` or ``refused`` is set once it is ``closed``."""

    def __init__(
        self,
        cluster: Cluster,
        agents: Agents,
        groups: Sequence[Sequence[int]],
        now_s: float,
        hold_s: float = LEAST_HOLD_S,
    ) -> None:
        """``groups``: members (global ranks) of the groups to test. ``hold_s``: how long the job may be held."""
        self._cluster, self._agents = cluster, agents
        self._tests_s = hold_s - _OTHER_S
        self._groups = tuple(tuple(members) for members in groups)
        self.tested = tuple(sorted({rank for members in self._groups for rank in members}))
        self.outcome: Validation | None = None
        self.refused = ""
        self.closed = False
        self.number = 0
        self._hold: Hold | None = None
        self._tests: dict[int, RunTests] = {}  # by node rank, once all are held
        self._ready: dict[int, TransferEndpoint] = {}  # ranks that are held
        self._figures: dict[int, RankFigures] = {}  # the best of the rounds so far
        # Rounds in which each device (by its rank) and link was measured.
        self._looks: Counter[int | tuple[int, int]] = Counter()
        self._awaited: set[int] = set()  # ranks whose figures of this round have not come
        self._rounds = 0
        self._tests_until_s = now_s
        self._tests_number = 0
        self._gather_s = _GATHER_S
        self._tries = 0
        self._renewed_s = self._deadline_s = now_s
        self._held_s: float | None = None  # when the first rank was held
        self._begin(now_s)

    def held(self, message: Held, node: Node, now_s: float) -> None:
        """Take a node's message about the hold of its ranks."""
        if self.closed or message.number != self.number:
            return
        told = [one for one in message.ranks if one.rank in node.ranks]
        unable = next((one for one in told if one.state == UNABLE), None)
        gone = [one.rank for one in told if one.state == RELEASED]
        if unable is not None:
            self.call_off(f"rank {unable.rank} cannot be held: {unable.why}")
        elif any(one.state == MISSED for one in told):
            self._release()
            self._begin(now_s)
        elif gone:
            self.call_off(f"ranks {fold_ranks(gone)} went on by themselves: the hold was not renewed in time")
        else:
            self._ready |= {one.rank: one.endpoint for one in told if one.state == HELD and one.endpoint}
            if self._held_s is None and self._ready:
                self._held_s = now_s
                self._deadline_s = now_s + self._gather_s
            if not self._tests and len(self._ready) == len(self._cluster.node_of):
                held_s = self._held_s if self._held_s is not None else now_s
                self._tests_until_s = max(held_s + self._tests_s, now_s + _LEAST_TESTS_S)
                self._test(self.tested, transfers(self._groups), now_s)

    def measured(self, message: Measured, node: Node, now_s: float) -> None:
        """Take the figures of one rank."""
        rank = message.figures.rank
        if self.closed or message.number != self.number or rank not in node.ranks:
            return
        if message.tests == self._tests_number and rank in self._awaited and _is_sane(message.figures):
            known = [self._figures[rank]] if rank in self._figures else []
            self._figures[rank] = best_of([*known, message.figures])
            self._looks.update({rank} if message.figures.devices else ())
            self._looks.update({(one.source, one.target) for one in message.figures.links})
            self._awaited.discard(rank)
            if not self._awaited:
                self._judge(now_s)

    def tick(self, now_s: float) -> None:
        """Renew the hold; decide when the time is up."""
        if self.closed or self._hold is None:
            return
        if now_s >= self._deadline_s:
            if self._tests:
                self._judge(now_s)
            else:
                late = [rank for rank in self._cluster.node_of if rank not in self._ready]
                self.call_off(f"ranks {fold_ranks(late)} did not come to the step to hold at")
        elif now_s - self._renewed_s >= RENEW_S:
            self._order(now_s)

    def call_off(self, why: str) -> None:
        """End the validation without an outcome: all ranks go on."""
        self._release()
        self.refused, self.closed = why, True

    def _begin(self, now_s: float) -> None:
        """Order a hold far enough ahead that no rank can be past it when it hears of it."""
        self._tries += 1
        cluster = self._cluster
        beats = list(cluster.beats())
        times = [beat.iteration_s for beat in beats if beat.iteration_s > 0]
        silent = sorted(
            node.name for node in cluster.nodes.values() if node.ranks and (node.silent or node.agent is None)
        )
        if silent:
            self.call_off(f"no agent answers on {', '.join(silent[:4])}: its ranks cannot be held")
        elif not times or not self.tested or not set(self.tested) <= set(cluster.node_of):
            self.call_off("the job has not done its first steps, or has no such ranks")
        elif len(self.tested) > MOST_RANKS:
            self.call_off(f"{len(self.tested)} ranks are too many to test at once; name up to {MOST_RANKS}")
        elif self._tries > _TRIES:
            self.call_off("ranks were past the step at every try")
        else:
            iteration_s = max(median(times), 1e-4)
            ahead = _AHEAD_STEPS * self._tries + math.ceil(_AHEAD_S * 2 ** (self._tries - 1) / iteration_s)
            step = max(beat.step for beat in beats) + ahead
            self.number = self._agents.order_number(now_s)
            self._hold = Hold(self.number, step, LEASE_S)
            self._ready.clear()
            self._held_s = None
            self._gather_s = _GATHER_S + max(times)
            self._deadline_s = now_s + 2 * (ahead + 1) * max(times) + 2 * _GATHER_S
            self._order(now_s)

    def _order(self, now_s: float) -> None:
        """Repeat the orders: that renews the hold, and replaces messages that were lost."""
        assert self._hold is not None
        self._renewed_s = now_s
        self._agents.order(self._hold)
        for node, tests in self._tests.items():
            if any(one.rank in self._awaited for one in tests.ranks):
                self._agents.order(tests, node)

    def _test(self, tested: Iterable[int], planned: Iterable[Transfer], now_s: float) -> None:
        """Have some of the held ranks test their devices and the links between them."""
        self._rounds += 1
        own: dict[int, list[Transfer]] = {rank: [] for rank in tested}
        for one in planned:
            own[one.source].append(one)
            own[one.target].append(one)
        self._tests_number = self._agents.order_number(now_s)
        limit_s = self._tests_until_s - now_s - (_LEAST_ROUND_S if self._rounds == 1 else 0.0)
        self._tests.clear()
        for node in self._cluster.nodes.values():
            ranks: list[RankTests] = []
            for rank in node.ranks:
                if rank in own:
                    targets = {one.target: self._ready[one.target] for one in own[rank] if one.source == rank}
                    ranks.append(RankTests(rank, tuple(own[rank]), targets, limit_s))
            if ranks:
                self._tests[node.rank] = RunTests(self.number, self._tests_number, tuple(ranks))
        self._awaited = set(own)
        self._deadline_s = self._tests_until_s + _ANSWER_S
        self._order(now_s)

    def _judge(self, now_s: float) -> None:
        held_s = now_s - self._held_s if self._held_s is not None else 0.0
        figures = [self._figures[rank] for rank in sorted(self._figures)]
        outcome = judge(self.tested, figures, self._cluster.node_of, held_s=held_s)
        pairs = {(slow.source, slow.target) for slow in outcome.links}
        again = {slow.figure.rank for slow in outcome.devices if not _is_proven(slow)}
        again |= {rank for pair in pairs for rank in pair}
        if again and self._rounds < _ROUNDS and self._tests_until_s - now_s >= _LEAST_ROUND_S:
            # Who stands out must do so in every round: on a busy host a neighbour disturbs now one, now another.
            links = [one for one in transfers(self._groups) if (one.source, one.target) in pairs]
            self._test(again, links, now_s)
            return
        self._release()
        self.outcome, self.closed = self._confirmed(outcome), True

    def _confirmed(self, outcome: Validation) -> Validation:
        """The outcome without devices and links that were slow in one round only."""
        devices = tuple(
            slow for slow in outcome.devices if self._looks[slow.figure.rank] > 1 or _is_proven(slow)
        )
        links = tuple(slow for slow in outcome.links if self._looks[slow.source, slow.target] > 1)
        once = [
            f"rank {slow.figure.rank} {of_device(slow)}" for slow in outcome.devices if slow not in devices
        ]
        once += [f"link {s.source} → {s.target} {of_link(s)}" for s in outcome.links if s not in links]
        doubts = tuple(f"{told}: not confirmed, no time was left to test it again" for told in once)
        return replace(outcome, devices=devices, links=links, missing=(*outcome.missing, *doubts))

    def _release(self) -> None:
        if self._hold is not None:
            self._agents.order(Release(self.number))
            self._hold = None
        self._tests.clear()


class Validations:
    """Runs one validation at a time, and refuses others meanwhile.

    ``standstill``: why no rank can be held now, "" while the job runs; ``is_wanted()``: cases may ask, too.
    """

    def __init__(
        self,
        cluster: Cluster,
        agents: Agents,
        standstill: Callable[[], str],
        effects: list[Effect],
        *,
        is_wanted: Callable[[], bool],
    ) -> None:
        self._cluster, self._agents, self._standstill = cluster, agents, standstill
        self._effects, self._is_wanted = effects, is_wanted
        self._case: ValidationCase | None = None
        self._tell: _Told = lambda outcome, refused, now_s: None  # whoever asked for it
        self._withdrawn: Callable[[Collection[int]], str] = lambda peers: ""  # why nobody wants it any more

    @property
    def under_way(self) -> bool:
        """Whether ranks are held, or will be."""
        return self._case is not None

    def begin(
        self, groups: Sequence[Sequence[int]], tell: _Told, is_closed: Callable[[], bool], now_s: float
    ) -> bool:
        """Test these groups for a case until it ``is_closed``; False: not now."""
        if not self._is_wanted() or self.under_way or self._standstill():
            return False
        self._case, self._tell = ValidationCase(self._cluster, self._agents, groups, now_s), tell
        self._withdrawn = lambda peers: "the slowness has gone away" if is_closed() else ""
        self._finish(now_s)
        return True

    def asked(self, peer: int, message: Validate, now_s: float) -> None:
        """Begin a validation that an operator asks for; the answer goes to this peer."""
        if why := "one is under way already" if self.under_way else self._standstill():
            self._effects.append(Send((peer,), Validated(refused=why)))
            return
        ranks = tuple(sorted(set(message.ranks))) or tuple(sorted(self._cluster.node_of))

        def tell(outcome: Validation | None, refused: str, now_s: float) -> None:
            nodes = tuple((rank, self._cluster.node_of.get(rank, "")) for rank in ranks)
            self._effects.append(Send((peer,), Validated(outcome, nodes, refused)))

        self._case = ValidationCase(self._cluster, self._agents, (ranks,), now_s, message.hold_s)
        self._tell = tell
        self._withdrawn = lambda peers: "" if peer in peers else "who asked for it has gone"
        self._finish(now_s)

    def told(self, node: Node, message: Held | Measured, now_s: float) -> None:
        """Take a node's message about the hold of its ranks, or what was measured there."""
        if self._case is None:
            return
        if isinstance(message, Held):
            self._case.held(message, node, now_s)
        else:
            self._case.measured(message, node, now_s)
        self._finish(now_s)

    def tick(self, peers: Collection[int], now_s: float) -> None:
        """Let time pass. ``peers``: the numbers of those that are connected."""
        if self._case is None:
            return
        if why := self._withdrawn(peers) or self._standstill():
            self._case.call_off(why)
        else:
            self._case.tick(now_s)
        self._finish(now_s)

    def end(self, now_s: float, why: str = "the job ended") -> None:
        """Call off the validation that is under way, and say ``why``."""
        if self._case is not None:
            self._case.call_off(why)
            self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        if self._case is not None and self._case.closed:
            case, self._case = self._case, None
            self._tell(case.outcome, case.refused, now_s)


def _is_proven(slow: SlowDevice) -> bool:
    return cause_of(slow) == "cpu quota"  # the kernel counted it


def _is_sane(figures: RankFigures) -> bool:
    values = [one.value for one in figures.devices]
    speeds = [one.bytes_per_s for one in figures.links]
    shares = [share for one in figures.devices for share in (one.limited, one.taken)]
    return (
        all(math.isfinite(value) and value > 0 for value in values)
        and all(math.isfinite(speed) and speed >= 0 for speed in speeds)
        and all(0 <= share <= 1 for share in shares)
    )
