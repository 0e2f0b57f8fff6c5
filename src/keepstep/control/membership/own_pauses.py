"""Pauses that the controller itself wants: for ranks that are to play on other nodes, and for nodes that have come."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from keepstep.control.membership.pauses import SEAL_S, Pause, Pauses
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.rendezvous import Launcher, Rendezvous
from keepstep.core.ranges import fold_nodes

_WARM_S = 60.0  # added to the time for sealing, as standbys are to be warm first (`launch.workers.restarts`)
_TOGETHER_S = 5.0  # quiet time after the last node has come, so that several nodes cost one pause
_GROWTH_S = 1800.0  # for every rank to seal a step that more nodes can begin with; nobody waits for an answer


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
