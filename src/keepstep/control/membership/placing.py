"""Tells launchers which ranks they play, and electors the table on which they have to agree before it counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.control.cluster import Cluster
from keepstep.control.effects import Effect, Reach, Send, StoreCouncil, StorePlacement, Tell
from keepstep.control.membership.council import Councils
from keepstep.control.membership.ending import Ending
from keepstep.control.membership.peers import Admission, Peer, Peers
from keepstep.control.membership.reforming_orders import Exclude
from keepstep.control.membership.rendezvous import Launcher, Placed, Rendezvous
from keepstep.core.exit_codes import TEMPORARY_FAILURE
from keepstep.wire.messages import Council, Imports, Moved, Placement, Spare, Stop

_MOST_TEXT = 500  # characters of a reason that is sent to a launcher


@dataclass(slots=True)
class Placing:
    """Gives out rank tables. ``effects``: what the controller is about to do."""

    cluster: Cluster
    rendezvous: Rendezvous
    councils: Councils
    peers: Peers
    ending: Ending
    effects: list[Effect]
    admission: Admission
    imports: Imports | None = None  # what the job's workers import, for standbys of spares
    # To be ended once electors agree on the table.
    excluded: list[Exclude] = field(default_factory=list[Exclude])
    elsewhere: Moved | None = None  # where the job's controller is, as its host told this one

    def take(self, table: dict[Launcher, Placement]) -> None:
        """Note which node plays which ranks."""
        ordered = sorted(table.items(), key=lambda item: item[1].first_rank)
        ends = [placement.first_rank for _, placement in ordered[1:]] + [ordered[0][1].world_size]
        self.cluster.resize(ordered[0][1].world_size)
        for (launcher, placement), end in zip(ordered, ends, strict=True):
            self.ending.launchers.setdefault(launcher, None)
            node = self.cluster.node(placement.node_rank, launcher.node)
            self.cluster.plays(node, range(placement.first_rank, end))

    def answer(self, placed: Placed) -> None:
        """Tell launchers that asked for a place which one they have, or why they have none."""
        if placed.is_new:
            table = self.rendezvous.placements
            self.take(table)
            rows = tuple((one.node, one.pid, placement) for one, placement in table.items())
            self.effects.append(StorePlacement(rows))
            self.effects += map(Tell, self.admission.differences([one.node for one in table]))
        for peer, placement in placed.answers:
            sender = self.peers.connected.get(peer)
            if sender is not None and sender.launcher is not None:
                node = sender.node = self.cluster.node(placement.node_rank, sender.launcher.node)
                node.launcher = peer
                node.back()
            if self.councils.allows(placement.incarnation):
                self.effects.append(Send((peer,), placement))
        if placed.spares:
            self.effects.append(Send(placed.spares, Spare(len(self.rendezvous.placements))))
            if self.imports is not None:
                self.effects.append(Send(placed.spares, self.imports))
        for peer, reason in placed.refusals:
            self.peers.refuse(peer, reason)

    def imported(self, imports: Imports) -> None:
        """Have the standbys of spares import what the job's workers do."""
        self.imports = imports
        found = (self.rendezvous.peer(launcher) for launcher in self.rendezvous.spares)
        if spares := tuple(peer for peer in found if peer is not None):
            self.effects.append(Send(spares, imports))

    def exclude(self, order: Exclude) -> None:
        """End a launcher that plays no part any more; not before electors agree, as it may be one of them."""
        if not self.councils.allows(self.rendezvous.incarnation):
            self.excluded.append(order)
            return
        self.effects.append(Tell(order.reason))
        peer = self.rendezvous.peer(order.launcher)
        if peer is not None:
            self.rendezvous.leave(order.launcher, peer)
            self.councils.electors.leaves(order.launcher)
            self.effects.append(
                Send((peer,), Stop(TEMPORARY_FAILURE, order.reason[:_MOST_TEXT], kind="hardware"))
            )

    def agreed(self) -> None:
        """Electors have agreed on the table: tell everybody their places, and end whom it leaves out."""
        for one, placement in self.rendezvous.placements.items():
            if (peer := self.rendezvous.peer(one)) is not None:
                self.effects.append(Send((peer,), placement))
        excluded, self.excluded = self.excluded, []
        for order in excluded:
            if order.launcher not in self.rendezvous.placements:
                self.exclude(order)

    def moved(self, sender: Peer, message: Moved) -> None:
        """The controller of this job is elsewhere: send the launchers there, unless they have places from this one."""
        if sender.role == "client" and not self.rendezvous.placements:
            self.elsewhere = message
            peers = tuple(number for number, peer in self.peers.connected.items() if peer.role == "launcher")
            self.effects.append(Send(peers, message))

    def reach(self, table: dict[Launcher, Placement]) -> None:
        """Find out which launchers can be reached as electors."""
        for launcher, seat in self.councils.electors.to_reach(table):
            if (peer := self.rendezvous.peer(launcher)) is not None:
                self.effects.append(Reach(peer, seat))

    def tell(self, council: Council) -> None:
        """Tell every launcher who elects, and the electors the table as well."""
        self.effects.append(StoreCouncil(council))
        for peer, sender in self.peers.connected.items():
            if sender.launcher is not None and self.rendezvous.peer(sender.launcher) in (peer, None):
                told = self.councils.tells(sender.launcher)
                if told is not None:
                    self.effects.append(Send((peer,), told))
