"""The remedy of a hang: processes to blame that will not go on are ended; then launchers restart the job as ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keepstep.control.incidents.case import Desk
from keepstep.control.incidents.hang_case import HangCase
from keepstep.control.incidents.hang_evidence import END_HUNG, LOOKS_S, blamed_by, proof
from keepstep.core.incident import Action
from keepstep.wire.messages import Kill, States

_AFTER_S = 0.5  # a look comes so long after the moment from which there may be a proof


class HangRemedy:
    """The remedy of one hang. ``send`` gives an order to the launcher of its rank; False: that is not connected."""

    def __init__(self, desk: Desk, case: HangCase, send: Callable[[Kill], bool]) -> None:
        self._desk, self.case, self._send = desk, case, send
        self.question: int | None = None
        self._looked = 0
        self._looked_s = 0.0
        self._left_s = 0.0  # time from the last look until there may be a proof against all

    def tick(self, now_s: float) -> None:
        """Ask for the states of the blamed ranks again when it is time."""
        pause_s = LOOKS_S[min(self._looked, len(LOOKS_S) - 1)]
        if self._left_s > 0:
            pause_s = min(pause_s, self._left_s + _AFTER_S)
        if self.question is not None or now_s - self._looked_s < pause_s:
            return
        homes = {home.rank for rank in self._blamed() if (home := self._desk.cluster.home(rank)) is not None}
        if homes:
            self._looked, self._looked_s = self._looked + 1, now_s
            self.question = self._desk.agents.ask_states(False, now_s, homes)

    def states(self, answers: Sequence[States], now_s: float) -> None:
        """Have processes ended against which there is a proof; repeatedly while they live, as an order may be lost.

        Only while a look at all ranks, a moment ago, has shown that the others still wait for just these.
        """
        self.question = None
        blamed, patience = self._blamed(), self._desk.patience
        states = {one.rank: one for answer in answers for one in answer.states if one.rank in blamed}
        self._left_s = max((patience.left_s(one, blamed[rank]) for rank, one in states.items()), default=0.0)
        kills: list[Kill] = []
        for rank, limit_s in blamed.items():
            state = states.get(rank)
            why = proof(state, limit_s, patience) if state is not None else ""
            if state is None or not why or not state.process:
                return
            kills.append(Kill(rank, state.process, f"it hung: {why}", state.now_s))
        if kills and not self.case.still_blames(blamed.keys(), now_s):
            self.case.look_again(now_s)
            return
        for kill in kills:
            if self._send(kill):
                self.case.acted(Action(END_HUNG, None, f"rank {kill.rank}, process {kill.process}"))

    def _blamed(self) -> dict[int, float]:
        """Limits of blamed ranks; empty when a kill would not help, or it is not sure enough who is to blame."""
        incident = self.case.incident
        if incident is None or self.case.closed:
            return {}
        desk = self._desk
        return blamed_by(incident, self.case.standing, desk.cluster.known_ranks, desk.register.ended)[0]
