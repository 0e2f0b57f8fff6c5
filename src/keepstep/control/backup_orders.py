"""Backups between nodes: agents report which snapshots they hold, and are told which to fetch and keep."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.peers.backup_plan import BackupPlan, Order, Stock
from keepstep.control.cluster import Cluster, Node
from keepstep.wire.messages import (
    MOST_HELD_RANKS,
    MOST_NODE_ENDPOINTS,
    BackUp,
    Holder,
    Inventory,
    Locate,
    Located,
    Pull,
)

_AWAY_S = 10.0  # a node not seen since this controller began is lost after so long
_BACK_S = 5.0  # longest wait of restoring ranks for an agent whose launcher is away, too
_STARTED_AGAIN_S = 60.0  # longest wait for an agent that its launcher starts again
_NODES_PER_S = 2500  # sets the time between plans: 5 s for 12,500 nodes, whose plan takes most of a second
_MOST_ALIKE = 4  # most nodes named as sources of a snapshot that is the same on all ranks
_PATIENCE_S = 5.0  # how long workers may take to save the step that could be the next target


@dataclass(slots=True)
class _Told:
    """The newest inventory of a node."""

    message: Inventory
    own: dict[int, tuple[int, ...]]  # packed keys by rank
    backups: dict[int, tuple[int, ...]]


class Backups:
    """Which node holds which snapshots, and the plan for the next ones. All of it is lost with the controller.

    ``copies``: nodes that back up each rank, 0: none do; ``lost_s``: a node without agent and launcher for so long is
    lost.
    """

    def __init__(self, copies: int, lost_s: float) -> None:
        self.copies, self._lost_s = copies, lost_s
        self.begin_again()

    def begin_again(self) -> None:
        """Forget what nodes hold and have to do, as they play other ranks now."""
        self.plan = BackupPlan(self.copies)
        self._told: dict[int, _Told] = {}  # inventories by node rank
        self._holders: dict[int, set[int]] = {}  # node ranks by rank
        self._away_s: dict[int, float] = {}  # since when agent and launcher are gone, by node rank
        self._lost: set[int] = set()
        self._sent: dict[int, BackUp] = {}  # the last order to each peer
        self._changed, self._next_s = True, 0.0
        self._looking: tuple[Key, float] | None = None  # the next target, and since when it is
        self._doubted: Key | None = None

    def heard(self, node: Node, message: Inventory) -> None:
        """Take a node's inventory: what its cache holds."""
        if message.node_rank != node.rank:
            return
        self.forget(node.rank)
        own, backups = ({row.rank: row.keys for row in rows} for rows in (message.own, message.backups))
        told = self._told[node.rank] = _Told(message, own, backups)
        for rank in (*told.own, *told.backups):
            self._holders.setdefault(rank, set()).add(node.rank)
        self._changed = True

    def forget(self, node_rank: int) -> None:
        """Forget what a node holds: its agent is another process now, or the node is lost."""
        told = self._told.pop(node_rank, None)
        for rank in (*told.own, *told.backups) if told else ():
            self._holders[rank].discard(node_rank)
        self._changed = True

    def locate(self, message: Locate, cluster: Cluster, expected_nodes: int, now_s: float) -> Located | None:
        """Which nodes with an agent hold snapshots of these ranks; None where there are no backups.

        The answer is to wait while the inventory of a node is missing, or a holder's agent may come back: a restore
        that finds no snapshot ends the job.
        """
        if self.copies == 0:
            return None
        if not self._ready(cluster, expected_nodes):
            return Located(message.request, waits="not all nodes have said what they hold")
        rows: list[Holder] = []
        for rank in message.ranks:
            for holder in sorted(self._holders.get(rank, ())):
                node, told = cluster.nodes.get(holder), self._told[holder]
                if node is None or len(rows) >= MOST_HELD_RANKS:
                    continue
                if node.agent is None:
                    patience_s = _BACK_S if node.launcher is None else _STARTED_AGAIN_S
                    if now_s - (node.heard_s or 0.0) < patience_s:
                        return Located(message.request, waits=f"the agent of node {holder} is away")
                    continue
                own = rank in told.own
                keys = {*told.own.get(rank, ()), *told.backups.get(rank, ())}
                rows.append(Holder(rank, holder, node.name, own, tuple(sorted(keys)), told.message.endpoints))
            rows += self._alike(rank, cluster)
        return Located(message.request, tuple(rows))

    def _alike(self, rank: int, cluster: Cluster) -> list[Holder]:
        """Nodes with a snapshot that is the same on all ranks; which ones depends on the rank, to spread the load."""
        found: list[Holder] = []
        having = sorted(one for one, told in self._told.items() if told.message.alike)
        for index in range(len(having)):
            told = self._told[having[(rank + index) % len(having)]]
            node, same = cluster.nodes.get(told.message.node_rank), told.message.alike
            if node is not None and node.agent is not None and same and same.rank != rank:
                found.append(Holder(same.rank, node.rank, node.name, True, same.keys, told.message.endpoints))
            if len(found) == _MOST_ALIKE:
                break
        return found

    def tick(
        self, cluster: Cluster, expected_nodes: int, now_s: float, doubted: Key | None = None
    ) -> list[tuple[int, BackUp]]:
        """The orders to send now, by peer.

        No snapshot from ``doubted`` on is backed up, as replicas differ in them: what is backed up stays.
        """
        self._changed = self._changed or doubted != self._doubted
        self._doubted = doubted
        self._watch(cluster, now_s)
        self._look_again(now_s)
        if not self._changed or now_s < self._next_s or not self._ready(cluster, expected_nodes):
            return []
        self._changed = False
        self._next_s = now_s + len(cluster.nodes) / _NODES_PER_S
        homes = {rank: node.ranks for rank, node in cluster.nodes.items()}
        home_of = {rank: node for node, ranks in homes.items() for rank in ranks}
        stocks = {
            rank: _stock(told, homes, home_of, self._doubted)
            for rank, told in self._told.items()
            if rank not in self._lost
        }
        domains = {rank: node.failure_domain for rank, node in cluster.nodes.items()}
        orders = self.plan.orders(homes.keys(), stocks, domains)
        said: list[tuple[int, BackUp]] = []
        for rank, order in orders.items():
            peer = cluster.nodes[rank].agent
            message = self._message(order, homes)
            if peer is not None and self._sent.get(peer) != message:
                self._sent[peer] = message
                said.append((peer, message))
        return said

    def withheld(self) -> str:
        """Why other nodes cannot fetch the snapshots of a node; "": they can."""
        if self.copies == 0:
            return "that takes --checkpoint-backups 1 or more"
        silent = [rank for rank, told in sorted(self._told.items()) if not told.message.endpoints]
        return f"node {silent[0]} gives no states on an address that others reach" if silent else ""

    def waits(self) -> str:
        """Why snapshots are not backed up; "": they are."""
        for rank, told in sorted(self._told.items()):
            if not told.message.able:
                return (
                    f"node {rank}: no memory for the slots that backups take; raise KEEPSTEP_CHECKPOINT_BYTES, "
                    "or free some"
                )
            if told.message.trouble:
                return f"node {rank}: {told.message.trouble}"
        return ""

    def steps_of(self, node_rank: int, ranks: Sequence[int]) -> tuple[int, int]:
        """The newest steps of all ranks of a node that are sealed there, and that another node holds; -1: none."""
        told = self._told.get(node_rank)
        if not ranks or not self._told:
            return -1, -1
        sealed = _newest(told.own, ranks) if told is not None else -1
        holders = self._holders.get(ranks[0], ())
        others = (self._told[one] for one in holders if one != node_rank)
        return sealed, max((_newest(one.backups, ranks) for one in others), default=-1)

    def _watch(self, cluster: Cluster, now_s: float) -> None:
        peers = set(cluster.agents().values())
        for peer in self._sent.keys() - peers:
            del self._sent[peer]
            self._changed = True
        for rank, node in cluster.nodes.items():
            if node.agent is not None or node.launcher is not None:
                self._away_s.pop(rank, None)
                if rank in self._lost:
                    self._lost.discard(rank)
                    self._changed = True
                if node.agent is not None and node.agent not in self._sent:
                    self._changed = True
                continue
            since_s = self._away_s.setdefault(rank, now_s)
            patience_s = self._lost_s if rank in self._told else max(self._lost_s, _AWAY_S)
            if rank not in self._lost and now_s - since_s >= patience_s:
                self._lost.add(rank)
                self.forget(rank)

    def _look_again(self, now_s: float) -> None:
        """Choose another target when workers do not save the chosen step: they may save rarely, or no more."""
        plan = self.plan
        if plan.first is None or plan.target is not None:
            self._looking = None
        elif self._looking is None or self._looking[0] != plan.first:
            self._looking = (plan.first, now_s)
        elif now_s - self._looking[1] > _PATIENCE_S:
            plan.look_again()
            self._looking, self._changed = None, True

    def _ready(self, cluster: Cluster, expected_nodes: int) -> bool:
        """Whether every node has sent its inventory, or is lost."""
        nodes = cluster.nodes
        return (
            self.copies > 0
            and len(nodes) >= max(2, expected_nodes)
            and all(node.ranks for node in nodes.values())
            and all(rank in self._told for rank in nodes if rank not in self._lost)
            and len(self._lost) < len(nodes)
        )

    def _message(self, order: Order, homes: Mapping[int, Sequence[int]]) -> BackUp:
        pulls: list[Pull] = []
        for home, holders in order.pulls:
            here = [one for one in holders if self._told[one].message.endpoints][:MOST_NODE_ENDPOINTS]
            pulls.append(Pull(tuple(homes[home]), tuple(self._told[one].message.endpoints for one in here)))
        ranks = tuple(rank for home in order.backs for rank in homes[home])
        keep, first, target = (key.pack() if key else 0 for key in (order.keep, order.first, order.target))
        return BackUp(keep, first, target, tuple(pulls), ranks, order.settled)


def _stock(
    told: _Told, homes: Mapping[int, Sequence[int]], home_of: Mapping[int, int], doubted: Key | None
) -> Stock:
    own = told.message.node_rank
    mine = _common(told.own, homes.get(own, ()))
    keep = _key(told.message.keep)
    return Stock(
        own=frozenset(key for key in mine if key == keep or not key.follows(doubted)),
        backups={
            home: keys
            for home in {home_of[rank] for rank in told.backups if rank in home_of}
            if (keys := _common(told.backups, homes[home]))
        },
        keep=keep,
        first=_key(told.message.first),
        able=told.message.able,
    )


def _common(held: Mapping[int, Collection[int]], ranks: Sequence[int]) -> frozenset[Key]:
    """The snapshots that exist for every one of these ranks."""
    sets = [set(held.get(rank, ())) for rank in ranks]
    words = sets[0].intersection(*sets[1:]) if sets else set[int]()
    return frozenset(key for key in map(_key, words) if key is not None)


def _newest(held: Mapping[int, tuple[int, ...]], ranks: Sequence[int]) -> int:
    """The step of the newest snapshot that exists for every one of these ranks; -1: there is none."""
    first = held.get(ranks[0], ())
    if not first:
        return -1
    if all(held.get(rank) == first for rank in ranks):
        key = _key(max(first))
    else:
        key = max(_common(held, ranks), default=None)
    return key.step if key is not None else -1


def _key(word: int) -> Key | None:
    key = Key.unpack(word)
    return key if key and key.step >= 0 else None
