"""Which incarnation is the newest, how many of them were restarts, and which number the next one has."""

from __future__ import annotations

from keepstep.control.membership.rendezvous import Rendezvous


class Incarnations:
    """Numbers of incarnations, taken from the rank table so that every controller of the job counts alike."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous

        # The highest incarnation that a launcher has told of. It is higher than the table's when the table is older
        # than the job, and where the launcher of one node has restarted its workers by itself.
        self._told = 0

        # The highest incarnation that some launcher has confirmed stopped. It is higher than `current` when a leader
        # before us had it halted before it was placed: that number is spent, as launchers start nothing of it any more.
        #
        # Invariant R5: every incarnation but the first is either a restart or a pause, so neither outnumbers them all.
        self._stopped = 0

    @property
    def current(self) -> int:
        """The incarnation that runs, or is being ended."""
        return max(self._told, self._rendezvous.incarnation)

    @property
    def restarts(self) -> int:
        """How many incarnations, the first one apart, began because something had failed."""
        return self.current - self._rendezvous.pauses

    def told(self, incarnation: int) -> None:
        """A member says that it plays this incarnation."""
        self._told = max(self._told, incarnation)

    def stopped(self, incarnation: int) -> None:
        """A launcher says that it runs nothing of this incarnation or earlier ones, and will start nothing of them."""
        self._stopped = max(self._stopped, incarnation)

    def following(self, *, is_pause: bool) -> tuple[int, int]:
        """The number of the next incarnation, and how many incarnations up to it were no restarts."""
        unplaced = max(0, self._stopped - self.current)
        return self.current + unplaced + 1, self._rendezvous.pauses + unplaced + is_pause
