"""What an operator orders by hand (``keepstep ctl``): one order at a time, answered when it is done or refused."""

from __future__ import annotations

from collections.abc import Collection

from keepstep.control.effects import Effect, Send
from keepstep.control.membership.pauses import SEAL_S, SUSPENDED, Pause, Pauses
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.reforming_orders import End, Order
from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.core.ranges import fold_nodes
from keepstep.wire.messages import Operate, Operated

STOPPED = 79  # exit code of a job that an operator stopped


class OperatorOrders:
    """``pauses``: where what is ordered is brought about; ``effects``: what the controller is about to do."""

    def __init__(
        self, rendezvous: Rendezvous, reforming: Reforming, pauses: Pauses, effects: list[Effect]
    ) -> None:
        self._rendezvous, self._reforming = rendezvous, reforming
        self._pauses, self._effects = pauses, effects

    def asked(self, peer: int, message: Operate, standstill: str, now_s: float) -> list[Order]:
        """An operator's order. ``standstill``: why the job runs no more, "" while it does."""
        pauses, verb = self._pauses, message.verb
        if verb == "stop" and not standstill:
            self._effects.append(Send((peer,), Operated("the job ends")))
            return [End(STOPPED, "stopped by an operator", by_operator=True)]
        is_in_the_way = pauses.wanted is not None and pauses.wanted.peer is None
        orders = pauses.give_up("an operator's order came first") if is_in_the_way else []
        pause = Pause(verb, now_s + SEAL_S, set(self._rendezvous.placements), peer)
        if why := standstill or pauses.objection(verb) or self._cannot_move(pause, message.nodes):
            self._effects.append(Send((peer,), Operated(refused=why)))
        elif verb in ("start", "resume"):
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
        elif reforming.suspended:  # it was so before, as a controller that began anew hears late
            self._pauses.give_up(SUSPENDED)
        elif not reforming.under_way:
            told = f"begins again, incarnation {reforming.incarnation}"
            if pause.exchange and not reforming.exchanged:
                self._pauses.give_up(f"a node was lost meanwhile; the job {told}")
            elif left := pause.unfit.keys() & self._rendezvous.placements.keys():
                there = fold_nodes(sorted(one.node for one in left))
                self._pauses.give_up(f"{there} stays, no spare was left for it; the job {told}")
            else:
                self._pauses.answer(Operated(told))

    def _cannot_move(self, pause: Pause, names: Collection[str]) -> str:
        """Note which ranks the operator wants moved; why they cannot be, or ""."""
        if pause.verb not in ("exchange", "replace"):
            return ""
        named = self._named(names)
        if isinstance(named, str):
            return named
        if pause.verb == "replace":
            pause.unfit = dict.fromkeys(named, "an operator replaces it")
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
