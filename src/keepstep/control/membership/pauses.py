"""A pause: the job is to begin again though nothing has failed. One at a time, and as a rule once a step is sealed.

Pure: orders for the controller come out; `Reforming` ends and begins workers as after a failure. Operators want pauses
(`operator_orders`), and so does the controller (`own_pauses`), for a remedy or for nodes that have come.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from keepstep.control.effects import Effect, Send, Tell
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.reforming_orders import Lapsed, Order
from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.control.membership.roll_call import BY_HAND, Occasion
from keepstep.core.ranges import fold_nodes
from keepstep.wire.messages import Operated, Seal

SEAL_S = 120.0  # every rank has to seal a step within so many seconds
SUSPENDED = "it is suspended; say resume"
_NOW = "; --now ends the workers at once"


@dataclass(slots=True)
class Pause:
    """What somebody wants: a pause, or that a suspended job goes on.

    ``exchange``: who takes whose place in it, by who has it; ``unfit``: members that spares replace, and why.
    """

    verb: str
    until_s: float  # the pause is given up if not all ranks have sealed a step by then
    unsealed: set[Launcher]  # members whose ranks have not all sealed a step yet
    peer: int | None = None  # connection of the operator who waits for an answer; None: nobody waits
    why: str = BY_HAND
    exchange: Mapping[Launcher, Launcher] = field(default_factory=dict[Launcher, Launcher])
    unfit: Mapping[Launcher, str] = field(default_factory=dict[Launcher, str])
    alike: bool = False  # the sealed step has to be one that more nodes can begin with
    step: int = -1  # the oldest step that a member has answered with; -1: none has answered
    is_ordered: bool = False  # the nodes have been told to re-form
    is_impossible: bool = False  # some rank seals no such step

    @property
    def moves_ranks(self) -> bool:
        """Whether ranks are to play on other nodes."""
        return bool(self.exchange or self.unfit)


class Pauses:
    """Has all ranks seal a step for the pause that is wanted, then has the nodes re-form.

    ``withheld()``: why nodes cannot have each other's states, "" if they can; ``effects``: what the controller is about
    to do.
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

    def objection(self, verb: str) -> str:
        """Why an order with this verb cannot be carried out now; "": it can."""
        suspended, placed = self._reforming.suspended, self._rendezvous.placements
        if self.wanted is not None:
            return f"{self.wanted.verb} is under way already"
        if verb in ("start", "resume"):
            if not placed:
                return "not all nodes are here yet; it begins by itself when they are"
            return "" if suspended else "it is not suspended"
        if not placed:
            return "no worker has been started yet"
        if suspended:
            return "it is suspended already" if verb == "suspend" else SUSPENDED
        if verb in ("exchange", "replace") and (why := self._withheld()):
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
