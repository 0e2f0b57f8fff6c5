"""The validation that is under way, if one is, and who asked for it: a slowdown's case, or an operator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from keepstep.control.cluster import Node
from keepstep.control.incidents.desk import Desk
from keepstep.control.incidents.slow_case import SlowCase
from keepstep.control.incidents.validation_case import ValidationCase
from keepstep.wire.messages import Held, Measured, Validate, Validated


class Validations:
    """One at a time; whoever asks meanwhile is refused."""

    def __init__(
        self, desk: Desk, standstill: Callable[[], str], answer: Callable[[int, Validated], None]
    ) -> None:
        """``standstill``: why nobody can be held, "" when the job runs. ``answer``: send to a peer."""
        self._desk, self._standstill, self._answer = desk, standstill, answer
        self._case: ValidationCase | None = None
        self._asker: SlowCase | int | None = None  # a case, or the number of an operator's peer

    @property
    def under_way(self) -> bool:
        """Whether ranks are, or will be, held."""
        return self._case is not None

    def begin(self, asker: SlowCase, groups: Sequence[Sequence[int]], now_s: float) -> bool:
        """Test these groups for a case, which hears of it by ``validated``; False: not now."""
        if self.under_way or self._standstill():
            return False
        self._case, self._asker = ValidationCase(self._desk, groups, now_s), asker
        self._finish(now_s)
        return True

    def asked(self, peer: int, message: Validate, now_s: float) -> None:
        """An operator's wish; the answer goes to this peer."""
        if why := "one is under way already" if self.under_way else self._standstill():
            self._answer(peer, Validated(refused=why))
            return
        ranks = tuple(sorted(set(message.ranks))) or tuple(sorted(self._desk.cluster.node_of))
        self._case, self._asker = ValidationCase(self._desk, (ranks,), now_s, message.hold_s), peer
        self._finish(now_s)

    def told(self, node: Node, message: Held | Measured, now_s: float) -> None:
        """A node says how its ranks stand to the hold, or what was measured there."""
        if self._case is None:
            return
        if isinstance(message, Held):
            self._case.held(message, node, now_s)
        else:
            self._case.measured(message, node, now_s)
        self._finish(now_s)

    def tick(self, peers: Collection[int], now_s: float) -> None:
        """Time passes. ``peers``: those that are connected."""
        if self._case is None:
            return
        if isinstance(self._asker, SlowCase) and self._asker.closed:
            self._case.call_off("the slowness has gone away")
        elif isinstance(self._asker, int) and self._asker not in peers:
            self._case.call_off("who asked for it has gone")
        elif why := self._standstill():
            self._case.call_off(why)
        else:
            self._case.tick(now_s)
        self._finish(now_s)

    def end(self, now_s: float) -> None:
        """The job has ended."""
        if self._case is not None:
            self._case.call_off("the job ended")
            self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        case, asker = self._case, self._asker
        if case is None or not case.closed:
            return
        self._case, self._asker = None, None
        if isinstance(asker, SlowCase):
            asker.validated(case.outcome, case.refused, now_s)
        elif asker is not None:
            nodes = tuple((rank, self._desk.cluster.node_of.get(rank, "")) for rank in case.tested)
            self._answer(asker, Validated(case.outcome, nodes, case.refused))
