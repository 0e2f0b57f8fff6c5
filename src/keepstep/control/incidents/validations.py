"""The validation that is under way, if any, and who asked for it: a slowdown's case, or an operator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from keepstep.control.cluster import Cluster, Node
from keepstep.control.effects import Effect, Send
from keepstep.control.incidents.agents import Agents
from keepstep.control.incidents.validation_case import ValidationCase
from keepstep.core.validation import Validation
from keepstep.wire.messages import Held, Measured, Validate, Validated

_Told = Callable[[Validation | None, str, float], None]  # what was measured, or why nothing was; the time


class Validations:
    """Runs one validation at a time, and refuses others meanwhile.

    ``standstill``: why no rank can be held now, "" while the job runs; ``is_wanted``: operators and cases may ask.
    """

    def __init__(
        self,
        cluster: Cluster,
        agents: Agents,
        standstill: Callable[[], str],
        effects: list[Effect],
        *,
        is_wanted: bool,
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
        if not self._is_wanted or self.under_way or self._standstill():
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

    def end(self, now_s: float) -> None:
        """Call off the validation that is under way, as the job has ended."""
        if self._case is not None:
            self._case.call_off("the job ended")
            self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        if self._case is not None and self._case.closed:
            case, self._case = self._case, None
            self._tell(case.outcome, case.refused, now_s)
