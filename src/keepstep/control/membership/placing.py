"""Tells launchers which ranks they play, and electors the table on which they have to agree before it counts."""

from __future__ import annotations

from keepstep.control.cluster import Cluster
from keepstep.control.effects import Effect, Reach, Send, StoreCouncil, StorePlacement, Tell
from keepstep.control.membership.council import Councils
from keepstep.control.membership.ending import Ending
from keepstep.control.membership.peers import Peers
from keepstep.control.membership.reforming_orders import Exclude
from keepstep.control.membership.rendezvous import Launcher, Placed, Rendezvous
from keepstep.wire.messages import Council, Placement, Spare, Stop

_EXCLUDED = 1  # exit code of a launcher that was excluded
_MOST_TEXT = 500  # characters of a reason that is sent to a launcher


class Placing:
    """Gives out rank tables. ``effects``: what the controller is about to do."""

    def __init__(
        self,
        cluster: Cluster,
        rendezvous: Rendezvous,
        councils: Councils,
        peers: Peers,
        ending: Ending,
        effects: list[Effect],
    ) -> None:
        self._cluster, self._rendezvous, self._councils = cluster, rendezvous, councils
        self._peers, self._ending, self._effects = peers, ending, effects
        self._excluded: list[Exclude] = []  # to be ended once electors have agreed on the table

    def take(self, table: dict[Launcher, Placement]) -> None:
        """Note which node plays which ranks."""
        ordered = sorted(table.items(), key=lambda item: item[1].first_rank)
        ends = [placement.first_rank for _, placement in ordered[1:]] + [ordered[0][1].world_size]
        self._cluster.resize(ordered[0][1].world_size)
        for (launcher, placement), end in zip(ordered, ends, strict=True):
            self._ending.launchers.setdefault(launcher, None)
            node = self._cluster.node(placement.node_rank, launcher.node)
            self._cluster.plays(node, range(placement.first_rank, end))

    def answer(self, placed: Placed) -> None:
        """Tell launchers that asked for a place which one they have, or why they have none."""
        if placed.is_new:
            table = self._rendezvous.placements
            self.take(table)
            rows = tuple((one.node, one.pid, placement) for one, placement in table.items())
            self._effects.append(StorePlacement(rows))
        for peer, placement in placed.answers:
            sender = self._peers.connected.get(peer)
            if sender is not None and sender.launcher is not None:
                node = sender.node = self._cluster.node(placement.node_rank, sender.launcher.node)
                node.launcher = peer
                node.back()
            if self._councils.allows(placement.incarnation):
                self._effects.append(Send((peer,), placement))
        if placed.spares:
            self._effects.append(Send(placed.spares, Spare(len(self._rendezvous.placements))))
        for peer, reason in placed.refusals:
            self._peers.refuse(peer, reason)

    def exclude(self, order: Exclude) -> None:
        """End a launcher that plays no part any more; not before electors agree, as it may be one of them."""
        if not self._councils.allows(self._rendezvous.incarnation):
            self._excluded.append(order)
            return
        self._effects.append(Tell(order.reason))
        peer = self._rendezvous.peer(order.launcher)
        if peer is not None:
            self._rendezvous.leave(order.launcher, peer)
            self._councils.electors.leaves(order.launcher)
            self._effects.append(Send((peer,), Stop(_EXCLUDED, order.reason[:_MOST_TEXT])))

    def agreed(self) -> None:
        """Electors have agreed on the table: tell everybody their places, and end whom it leaves out."""
        for one, placement in self._rendezvous.placements.items():
            if (peer := self._rendezvous.peer(one)) is not None:
                self._effects.append(Send((peer,), placement))
        excluded, self._excluded = self._excluded, []
        for order in excluded:
            if order.launcher not in self._rendezvous.placements:
                self.exclude(order)

    def reach(self, table: dict[Launcher, Placement]) -> None:
        """Find out which launchers can be reached as electors."""
        for launcher, seat in self._councils.electors.to_reach(table):
            if (peer := self._rendezvous.peer(launcher)) is not None:
                self._effects.append(Reach(peer, seat))

    def tell(self, council: Council) -> None:
        """Tell every launcher who elects, and the electors the table as well."""
        self._effects.append(StoreCouncil(council))
        for peer, sender in self._peers.connected.items():
            if sender.launcher is not None and self._rendezvous.peer(sender.launcher) in (peer, None):
                told = self._councils.tells(sender.launcher)
                if told is not None:
                    self._effects.append(Send((peer,), told))
