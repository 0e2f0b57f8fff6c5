"""A pause: the job is to begin again though nothing has failed. One at a time, and as a rule once a step is sealed.

Pure: orders for the controller come out; `Reforming` ends and begins workers as after a failure. Operators want pauses
(`OperatorOrders`), and so does the controller: `RankMoves` for a remedy, `Growth` for nodes that have come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from keepstep.control.effects import Effect, Send, Tell
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.reforming_orders import End, Lapsed, Order
from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.control.membership.roll_call import BY_HAND, Occasion
from keepstep.core.exit_codes import STOPPED_BY_HAND
from keepstep.core.ranges import fold_nodes
from keepstep.wire.messages import Operate, Operated, Seal

_WARM_S = 60.0  # added to the time for sealing, as standbys are to be warm first (`launch.workers.restarts`)
_TOGETHER_S = 5.0  # quiet time after the last node has come, so that several nodes cost one pause
_GROWTH_S = 1800.0  # for every rank to seal a step that more nodes can begin with; nobody waits for an answer
SEAL_S = 120.0  # every rank has to seal a step within so many seconds
SUSPENDED = "it is suspended; say resume"
_MOVING = ("exchange", "replace", "drain")
_NOW = "; --now ends the workers at once"


@dataclass(slots=True)
class Pause:
    """What somebody wants: a pause, or that a suspended job goes on."""

    verb: str
    until_s: float  # the pause is given up if not all ranks have sealed a step by then
    unsealed: set[Launcher]  # members whose ranks have not all sealed a step yet
    peer: int | None = None  # connection of the operator who waits for an answer; None: nobody waits
    why: str = BY_HAND
    # Who takes whose place in it, by who has it; and members that spares replace, and why.
    exchange: Mapping[Launcher, Launcher] = field(default_factory=dict[Launcher, Launcher])
    unfit: Mapping[Launcher, str] = field(default_factory=dict[Launcher, str])
    told: str = ""  # what the scheduler is to be told of a node that is drained
    alike: bool = False  # the sealed step has to be one that more nodes can begin with
    step: int = -1  # the oldest step that a member has answered with; -1: none has answered
    is_ordered: bool = False  # the nodes have been told to re-form
    is_impossible: bool = False  # some rank seals no such step

    @property
    def is_remedy(self) -> bool:
        """Whether keepstep itself wants it, because something is wrong."""
        return self.peer is None and self.verb != "grow"

    @property
    def moves_ranks(self) -> bool:
        """Whether ranks are to play on other nodes."""
        return bool(self.exchange or self.unfit)


class Pauses:
    """Has all ranks seal a step for the pause that is wanted, then has the nodes re-form.

    ``withheld()``: why nodes cannot have each other's states, "" if they can.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        reforming: Reforming,
        withheld: Callable[[], str],
        effects: list[Effect],
    ) -> None:
        self._rendezvous, self._reforming = rendezvous, reforming
        self._withheld, self._effects = withheld, effects
        self.wanted: Pause | None = None

    def objection(self, verb: str, *, by_hand: bool = False) -> str:
        """Why an order with this verb cannot be carried out now; "": it can. One ``by_hand`` comes first."""
        suspended, placed = self._reforming.suspended, self._rendezvous.placements
        if self.wanted is not None and not (by_hand and self.wanted.peer is None):
            return f"{self.wanted.verb} is under way already"
        if verb in ("start", "resume"):
            if not placed:
                return "not all nodes are here yet; it begins by itself when they are"
            return "" if suspended else "it is not suspended"
        if not placed:
            return "no worker has been started yet"
        if suspended:
            return "it is suspended already" if verb == "suspend" else SUSPENDED
        if verb in _MOVING and (why := self._withheld()):
            return f"ranks that move would find no state on their new node: {why}"
        if len(placed) > 1 and not self._rendezvous.max_restarts:
            return "its nodes cannot begin again together: that takes --max-restarts when the job is started"
        return ""

    def want(self, pause: Pause) -> None:
        """Ask all launchers to have their ranks seal a step for this pause, to which there is no `objection`."""
        self.wanted = pause
        leaving, incarnation, warm = set(pause.exchange), self._reforming.incarnation, pause.peer is None
        for members, leave in ((leaving, True), (pause.unsealed - leaving, False)):
            if members:
                peers = sorted(peer for one in members if (peer := self._rendezvous.peer(one)) is not None)
                seal = Seal(incarnation, leave=leave, alike=pause.alike, warm=warm)
                self._effects.append(Send(tuple(peers), seal))

    def sealed(self, launcher: Launcher, incarnation: int, step: int, why: str, now_s: float) -> list[Order]:
        """All ranks of a launcher have sealed a step since they were asked; -1: they seal none, and ``why``."""
        pause = self.wanted
        if pause is None or pause.is_ordered or incarnation != self._reforming.incarnation:
            return []
        if step < 0:
            none = f"node {launcher.node} {why or 'keeps no checkpoint in memory, so no step is sealed'}"
            pause.is_impossible = True
            if pause.peer is None:
                return [*self.give_up(none), Tell(f"{pause.why}; the job goes on without: {none}")]
            return self.give_up(
                none if pause.moves_ranks else f"{none}{_NOW}, and the script begins as after any restart"
            )
        pause.unsealed.discard(launcher)
        pause.step = step if pause.step < 0 else min(pause.step, step)
        return [] if pause.unsealed else self.order(pause, now_s)

    def tick(self, peers: Collection[int], now_s: float) -> list[Order]:
        """Time passes: a pause may come to nothing, or a failure be faster. ``peers``: connections that stand."""
        pause = self.wanted
        if pause is None or pause.is_ordered:
            return []
        if pause.peer is None:
            if self._reforming.under_way:
                return self.give_up("a failure was faster")  # its re-forming takes in newcomers
            if not pause.unsealed:  # the ranks go back to a step that is sealed already
                return self.order(pause, now_s)
            # Some node may not have heard.
            return self.give_up("not all ranks sealed a step") if now_s >= pause.until_s else []
        if pause.peer not in peers:
            self.wanted = None
        elif self._reforming.under_way:
            return self.order(pause, now_s)  # a failure was faster: nothing will be sealed
        elif now_s >= pause.until_s:
            missing = fold_nodes(sorted(launcher.node for launcher in pause.unsealed))
            return self.give_up(f"{missing} sealed no step within {SEAL_S:g} s{_NOW}")
        return []

    def order(self, pause: Pause, now_s: float) -> list[Order]:
        """Have the nodes re-form, whether or not a step is sealed."""
        pause.is_ordered = True
        self.wanted = None if pause.peer is None else pause
        if pause.peer is not None and pause.moves_ranks and self._reforming.under_way:
            return self.give_up("a failure was faster; say it again once the job trains")
        order = Occasion(pause.why, pause.exchange, pause.unfit, is_held=pause.verb == "suspend")
        return self._reforming.pause(order, now_s)

    def give_up(self, why: str) -> list[Order]:
        """The pause that is wanted will not be: tell the operator or the planner why."""
        pause = self.wanted
        if pause is not None and pause.peer is not None:
            self.answer(Operated(refused=why))
        self.wanted = None
        return [Lapsed(why)] if pause is not None and pause.peer is None and pause.moves_ranks else []

    def answer(self, answer: Operated) -> None:
        """Tell the operator what has become of the order."""
        if self.wanted is not None and self.wanted.peer is not None:
            self._effects.append(Send((self.wanted.peer,), answer))
        self.wanted = None


class RankMoves:
    """Pauses for remedies S3 and S4, in which ranks move to other nodes. The next rank table shows whether they did."""

    def __init__(self, rendezvous: Rendezvous, reforming: Reforming, pauses: Pauses) -> None:
        self._rendezvous, self._reforming, self._pauses = rendezvous, reforming, pauses

    def exchange(self, takers: Mapping[int, int], why: str, now_s: float) -> str:
        """Have nodes take others' ranks when all have sealed a step; why not, or "".

        ``takers``: who takes a node's ranks, by that node; each once (node ranks).
        """
        by_rank = self._by_rank
        if refused := self._objection("exchange"):
            return refused
        if not takers.keys() <= by_rank.keys():
            return f"the job has {len(by_rank)} nodes now"
        exchange = {by_rank[holder]: by_rank[taker] for holder, taker in takers.items()}
        for holder, taker in exchange.items():
            if refused := self._rendezvous.unequal(holder, taker):
                return refused
        until_s = now_s + _WARM_S + SEAL_S
        self._pauses.want(Pause("exchange", until_s, set(by_rank.values()), why=why, exchange=exchange))
        return ""

    def replace(self, unfit: Mapping[int, str], why: str, now_s: float) -> str:
        """Have spares take the ranks of these nodes when all have sealed a step; why not, or "".

        ``unfit``: why each is to be replaced, by node rank.
        """
        if refused := self._objection("replace") or self.irreplaceable(unfit):
            return refused
        by_rank, until_s = self._by_rank, now_s + _WARM_S + SEAL_S
        named = {launcher: unfit[rank] for rank, launcher in by_rank.items() if rank in unfit}
        self._pauses.want(Pause("replace", until_s, set(by_rank.values()), why=why, unfit=named))
        return ""

    def go_back(self, why: str, now_s: float) -> str:
        """Have all ranks begin again from what they have sealed already; why not, or ""."""
        if refused := self._objection("restart"):
            return refused
        self._pauses.want(Pause("restart", now_s + SEAL_S, set(), why=why))
        return ""

    def irreplaceable(self, nodes: Collection[int]) -> str:
        """Why spares cannot take the ranks of these nodes (node ranks); "": they can."""
        members = [launcher for rank, launcher in self._by_rank.items() if rank in nodes]
        return self._rendezvous.irreplaceable(members) if len(members) == len(nodes) else "it was not placed"

    def _objection(self, verb: str) -> str:
        refused = self._pauses.objection(verb)
        return refused or ("the job begins again just now" if self._reforming.under_way else "")

    @property
    def _by_rank(self) -> dict[int, Launcher]:
        """Members by node rank, in the order of the table."""
        return {one.node_rank: launcher for launcher, one in self._rendezvous.placements.items()}


class Growth:
    """Wants a pause for newcomers, once all ranks have sealed a step that all of them can begin with."""

    def __init__(self, rendezvous: Rendezvous, reforming: Reforming, pauses: Pauses) -> None:
        self._rendezvous, self._reforming, self._pauses = rendezvous, reforming, pauses
        self._seen: tuple[list[Launcher], int] = ([], 0)
        self._since_s = 0.0
        self._wanted: tuple[int, Pause] | None = None  # in which incarnation a pause was wanted last

    @property
    def newcomers(self) -> list[Launcher]:
        """Launchers that would be taken in now."""
        return [] if self._reforming.under_way else self._rendezvous.newcomers

    def tick(self, now_s: float) -> None:
        """Time passes while the job trains."""
        newcomers, incarnation = seen = (self.newcomers, self._reforming.incarnation)
        if seen != self._seen:
            self._seen, self._since_s = seen, now_s
        if not newcomers or now_s - self._since_s < _TOGETHER_S or self._pauses.objection("restart"):
            return
        if self._wanted is not None and self._wanted[0] == incarnation and self._wanted[1].is_impossible:
            return
        why = f"{fold_nodes(one.node for one in newcomers)} can be taken in"
        pause = Pause("grow", now_s + _GROWTH_S, set(self._rendezvous.placements), why=why, alike=True)
        self._wanted = (incarnation, pause)
        self._pauses.want(pause)


@dataclass(frozen=True, slots=True)
class Drained:
    """A node that an operator has drained: a spare has its ranks, and the scheduler is to give it to nobody."""

    node: str
    why: str  # the operator's words
    incarnation: int  # the first one without it


class OperatorOrders:
    """What an operator orders by hand (``keepstep ctl``): one order at a time, answered when it is done or refused."""

    def __init__(
        self, rendezvous: Rendezvous, reforming: Reforming, pauses: Pauses, effects: list[Effect]
    ) -> None:
        self._rendezvous, self._reforming = rendezvous, reforming
        self._pauses, self._effects = pauses, effects
        self.drained: list[Drained] = []  # nodes that the scheduler is to keep other jobs from

    def asked(self, peer: int, message: Operate, standstill: str, now_s: float) -> list[Order]:
        """An operator's order. ``standstill``: why the job runs no more, "" while it does."""
        pauses, verb = self._pauses, message.verb
        if verb == "stop" and not standstill:
            self._effects.append(Send((peer,), Operated("the job ends")))
            return [End(STOPPED_BY_HAND, "stopped by an operator", by_operator=True)]
        pause = Pause(verb, now_s + SEAL_S, set(self._rendezvous.placements), peer, told=message.why)
        refused = (
            standstill or pauses.objection(verb, by_hand=True) or self._cannot_move(pause, message.nodes)
        )
        if refused or message.only_say:
            answer = Operated(refused=refused) if refused else Operated(self._would_be(pause))
            self._effects.append(Send((peer,), answer))
            return []
        is_in_the_way = pauses.wanted is not None
        orders = pauses.give_up("an operator's order came first") if is_in_the_way else []
        if verb in ("start", "resume"):
            pause.is_ordered, pauses.wanted = True, pause
            orders += self._reforming.resume(now_s)
        elif message.now or self._reforming.under_way:
            orders += pauses.order(pause, now_s)
        else:
            pauses.want(pause)
        return orders

    def tick(self) -> None:
        """Time passes: answer the operator once the order is carried out, or has come to nothing."""
        pause, reforming = self._pauses.wanted, self._reforming
        if pause is None or not pause.is_ordered:
            return
        if pause.verb == "suspend":
            if reforming.suspended:
                after = f" after step {pause.step}" if pause.step >= 0 else ""
                kept = "standbys and checkpoints are kept; go on with resume"
                self._pauses.answer(Operated(f"suspended{after}: {kept}"))
        elif reforming.suspended:  # a controller that was started again hears late that the job is suspended
            self._pauses.give_up(SUSPENDED)
        elif not reforming.under_way:
            told = f"begins again, incarnation {reforming.incarnation}"
            if pause.exchange and not reforming.exchanged:
                self._pauses.give_up(f"a node was lost meanwhile; the job {told}")
            elif left := pause.unfit.keys() & self._rendezvous.placements.keys():
                there = fold_nodes(sorted(one.node for one in left))
                self._pauses.give_up(f"{there} stays, no spare was left for it; the job {told}")
            else:
                if pause.verb == "drain":
                    (node,) = (one.node for one in pause.unfit)
                    self.drained.append(Drained(node, pause.told, reforming.incarnation))
                    told = f"{node} has left the job, which {told}"
                self._pauses.answer(Operated(told))

    def _would_be(self, pause: Pause) -> str:
        """What an order to move ranks would do now."""
        again = "all would begin again once the next step is sealed; nothing was done"
        if pause.exchange:
            one, other = pause.exchange
            return f"{one.node} and {other.node} would exchange their ranks; {again}"
        (node,) = pause.unfit
        spare = self._rendezvous.spare_for(node)
        return f"{spare} would take the ranks of {node.node}, which would leave the job; {again}"

    def _cannot_move(self, pause: Pause, names: Collection[str]) -> str:
        """Note which ranks the operator wants moved; why they cannot be, or ""."""
        if pause.verb not in _MOVING:
            return ""
        named = self._named(names)
        if isinstance(named, str):
            return named
        if pause.verb != "exchange":
            pause.unfit = dict.fromkeys(named, f"an operator {pause.verb}s it")
            return self._rendezvous.irreplaceable(named) if named else "give the node that is to be replaced"
        if len(named) != 2 or named[0] == named[1]:
            return "give two nodes that are to exchange their ranks"
        pause.exchange = {named[0]: named[1], named[1]: named[0]}
        return self._rendezvous.unequal(named[0], named[1])

    def _named(self, names: Collection[str]) -> list[Launcher] | str:
        """The members with these names or node ranks; if there is none for one of them, the reason to refuse."""
        found: list[Launcher] = []
        table = self._rendezvous.placements
        for name in names:
            named = [one for one, at in table.items() if name in (one.node, str(at.node_rank))]
            if not named:
                there = fold_nodes(sorted({one.node for one in table}))
                return f"{name} is no node of this job; it has {there}"
            if len(named) > 1:
                return f"{len(named)} launchers run on {name}; give their node ranks"
            found += named
        return found
