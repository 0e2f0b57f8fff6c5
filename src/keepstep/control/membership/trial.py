"""What counts until all ranks have made a step again: newcomers are on trial, and a job may have one size only."""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.control.membership.rendezvous import Launcher

_BARRED_S = 600.0  # for which a node with which the job did not train is not taken in again


class Trial:
    """What depends on whether the job trains: whether its newcomers stay, and whether it may have another size."""

    def __init__(self) -> None:
        # Members with which the job has not trained yet. A failure before it does leaves them out again.
        #
        # Invariant R11: all of them are members.
        self.newcomers: frozenset[Launcher] = frozenset()

        # Why the job could not have had another size when it was placed. It still cannot, though those who have just
        # come say nothing of the kind: they hold no state yet.
        self.rigid = ""

        # Nodes that were left out again, until when they are not taken in (seconds). They are spares meanwhile.
        self._barred: dict[str, float] = {}

    @property
    def is_under_way(self) -> bool:
        """Whether it has still to be seen that the job trains."""
        return bool(self.newcomers or self.rigid)

    def begin(self, newcomers: Iterable[Launcher], rigid: str) -> None:
        """The job was placed with these newcomers; ``rigid``: why it could not have had another size, if so."""
        self.newcomers, self.rigid = frozenset(newcomers), rigid or self.rigid

    def passed(self) -> None:
        """All ranks have made a step, so nothing is on trial any more."""
        self.newcomers, self.rigid = frozenset(), ""

    def bar(self, launchers: Iterable[Launcher], now_s: float) -> None:
        """The job did not train with these newcomers: their nodes are not taken in for a while."""
        self._barred.update((one.node, now_s + _BARRED_S) for one in launchers)

    def barred(self, now_s: float) -> frozenset[str]:
        """Nodes that are not to be taken in now."""
        self._barred = {node: until_s for node, until_s in self._barred.items() if now_s < until_s}
        return frozenset(self._barred)
