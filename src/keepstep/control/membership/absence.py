"""Which members are away, since when, and whom that makes lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from keepstep.control.membership.rendezvous import Launcher
from keepstep.wire.messages import Placement

_STALL_S = 1.0  # when a tick is this late, the controller slept, not the launchers
_MOST_SHARE = 10  # more than a tenth of the job away at once is rather the network's fault, or our own


class Absence:
    """Members without a connection.

    ``heard(node_rank, now_s)``: whether the node's agent speaks, which ends with its launcher. ``lost_s``: away and
    unheard for so long means lost; ``away_s``: the same for those that this controller has never heard, and when many
    are away at once.
    """

    def __init__(self, heard: Callable[[int, float], bool], lost_s: float, away_s: float) -> None:
        self._heard, self._lost_s, self._away_s = heard, lost_s, away_s

        # Members without a connection, and since when (seconds; infinite: from the first tick on). One that is lost
        # stays here until its place is taken, as the share of members that are away at once counts.
        #
        # Invariant R6: all of them are members.
        self._since_s: dict[Launcher, float] = {}

        # Members that an earlier controller placed and that this one has never heard. They may be on their way to it,
        # so they are given longer.
        #
        # Invariant R7: all of them are away.
        self._unheard: set[Launcher] = set()

        # Launchers that are gone for certain, as their agents or they themselves said so. A member among them is lost
        # as soon as its connection ends.
        self.orphaned: set[Launcher] = set()

        # Members whose workers have all ended well: nothing is missed when they go.
        #
        # Invariant R8: there are none while a re-forming is under way, as whoever has finished has to begin again.
        self.finished: set[Launcher] = set()

        # When this controller last looked. A late look starts everybody's time anew, as a process that slept has heard
        # nobody.
        self._ticked_s: float | None = None

    def restored(self, members: Collection[Launcher], former: Launcher | None) -> None:
        """An earlier controller placed these members; ``former`` hosted it, and was away for a lease already."""
        self._since_s = dict.fromkeys(members, math.inf)
        self._unheard = set(members) - {former}

    def came(self, launcher: Launcher) -> None:
        """A launcher has joined, so it is not away."""
        self._since_s.pop(launcher, None)
        self._unheard.discard(launcher)
        self.orphaned.discard(launcher)

    def went(self, member: Launcher, now_s: float) -> None:
        """A member is away from now on, as its last connection has gone."""
        self._since_s.setdefault(member, now_s)

    def keep(self, members: Collection[Launcher]) -> None:
        """From now on these are the members; launchers that are none are not missed."""
        self._since_s = {one: since_s for one, since_s in self._since_s.items() if one in members}
        self._unheard.intersection_update(members)
        self.orphaned.intersection_update(members)

    def tick(self, now_s: float) -> float:
        """Time passes. Returns the seconds for which this controller slept, 0 if it did not."""
        before_s, self._ticked_s = self._ticked_s, now_s
        if before_s is None:
            self._since_s = {
                one: now_s if since_s == math.inf else since_s for one, since_s in self._since_s.items()
            }
        elif now_s - before_s > _STALL_S:
            self._since_s = dict.fromkeys(self._since_s, now_s)
            return now_s - before_s
        return 0.0

    def lost(self, table: Mapping[Launcher, Placement], now_s: float) -> list[Launcher]:
        """Members that are lost: away for too long, or gone for certain."""
        many = len(self._since_s) > max(1, len(table) // _MOST_SHARE)
        found: list[Launcher] = []
        for launcher, since_s in self._since_s.items():
            if launcher in self.finished:
                continue
            patience_s = self._away_s if many or launcher in self._unheard else self._lost_s
            is_silent = now_s - since_s >= patience_s and not self._heard(table[launcher].node_rank, now_s)
            if launcher in self.orphaned or is_silent:
                found.append(launcher)
        return found
