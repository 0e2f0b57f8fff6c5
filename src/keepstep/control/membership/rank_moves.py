"""Remedies S3 and S4, as the planner orders them: nodes take each other's ranks, or spares take a slow node's."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from keepstep.control.membership.pauses import SEAL_S, Pause, Pauses
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.rendezvous import Launcher, Rendezvous

_WARM_S = 60.0  # added to the time for sealing, as standbys are to be warm first (`launch.workers.restarts`)


class RankMoves:
    """Wants pauses in which ranks move to other nodes. The next rank table shows whether they did."""

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
