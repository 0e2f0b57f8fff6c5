"""Remedy S2: how the ranks of a job report that they divide micro-batches, and the order to divide them differently.

An order goes to rank 0, and is repeated until all ranks report that they follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from keepstep.control.cluster import Node
from keepstep.control.incidents.case import Desk
from keepstep.control.membership.reforming import Reforming
from keepstep.control.membership.rendezvous import MOST_RANKS
from keepstep.core.microbatch_shares import Split, equal_shares, objection
from keepstep.core.ranges import fold_ranks
from keepstep.wire.messages import MOST_REPLICAS, Shares, Splits

if TYPE_CHECKING:
    from keepstep.mitigate import Replicas

LATE_STEPS = 16  # steps after which an order without effect has failed, if _LATE_S have passed, too
_LATE_S = 30.0  # seconds after which it has failed, if LATE_STEPS were made, too
_AGAIN_S = 1.0  # how often an order is repeated


class OrderedShares:
    """The shares of one job's replicas: the reported ones, and an order that is not yet in force."""

    def __init__(self, desk: Desk, reforming: Reforming) -> None:
        self._desk, self._reforming = desk, reforming
        self.splits: dict[int, Split] = {}  # how ranks report that they divide micro-batches, by rank
        self._told_of = 0  # the incarnation of the reported splits
        self._ordered: Shares | None = None  # the order that is not yet in force
        self._ordered_s = self._again_s = 0.0
        self._ordered_step = 0

    @property
    def is_ordered(self) -> bool:
        """Whether an order is not yet in force."""
        return self._ordered is not None

    @property
    def in_force(self) -> bool:
        """Whether the replicas have ordered shares that are unequal."""
        split = next(iter(self.splits.values()), None)
        if split is None or not split.number or self._told_of != self._reforming.incarnation:
            return False
        equal = dict(enumerate(equal_shares(split.count, split.replicas, split.multiple_of)))
        return any(one.share != equal.get(one.replica) for one in self.splits.values())

    @property
    def since_step(self) -> int:
        """The last step before all ranks had their present shares."""
        return max((split.step for split in self.splits.values()), default=0)

    def missing(self) -> str:
        """Why no shares can be ordered; "" when they can."""
        cluster, splits = self._desk.cluster, self.splits
        absent = [rank for rank in cluster.node_of if rank not in splits]
        if absent:
            return f"ranks {fold_ranks(absent)} do not divide micro-batches by a session"
        if not splits or self._told_of != self._reforming.incarnation:
            return "no rank has told yet how it divides micro-batches"
        first = next(iter(splits.values()))
        alike = {
            (one.count, one.replicas, one.multiple_of, one.at_most, one.number) for one in splits.values()
        }
        if len(alike) > 1 or first.replicas < 2:
            return "the ranks divide micro-batches in different ways"
        if together := [rank for rank, one in splits.items() if not one.movable]:
            return f"ranks {fold_ranks(together)} have collective operations in each micro-batch"
        return ""

    def fitting(self, replicas: Replicas) -> tuple[list[int], list[int]]:
        """Equal shares, and shares that fit the replicas' speeds. Call it only while nothing is `missing`."""
        split = next(iter(self.splits.values()))
        equal = equal_shares(split.count, split.replicas, split.multiple_of)
        return equal, replicas.best(split.multiple_of, split.at_most)

    def told(self, node: Node, message: Splits) -> None:
        """Take how the ranks of a node divide micro-batches."""
        for split in message.ranks:
            home = self._desk.cluster.home(split.rank)
            possible = not objection(split.count, split.replicas, split.multiple_of, split.at_most)
            sane = split.replica < split.replicas <= MOST_REPLICAS and 0 < split.share <= split.count
            if not (possible and sane and split.rank < MOST_RANKS and home in (None, node)):
                continue
            if split.incarnation > self._told_of:  # the controller may not know yet that it has begun
                self._told_of = split.incarnation
                self.splits.clear()
            if split.incarnation == self._told_of:
                self.splits[split.rank] = split

    def begin_again(self) -> None:
        """Forget splits and orders, as the job was re-formed with equal shares."""
        if self._told_of < self._reforming.incarnation:
            self.splits.clear()
        self._ordered = None

    def order(self, shares: Sequence[int], now_s: float) -> None:
        """Order how many micro-batches each replica takes."""
        number = self._desk.agents.order_number(now_s)
        self._ordered = Shares(number, 0, self._reforming.incarnation, tuple(shares))
        self._ordered_s, self._ordered_step = now_s, self._desk.cluster.newest_step
        self._send(self._ordered, now_s)

    def tick(self, now_s: float) -> Literal["in force", "failed", ""]:
        """Let time pass. Returns what has become of the order; "": there is none, or it is not known yet."""
        order = self._ordered
        if order is None:
            return ""
        if self.splits and all(split.number == order.number for split in self.splits.values()):
            self._ordered = None
            return "in force"
        late = self._desk.cluster.newest_step > self._ordered_step + LATE_STEPS
        if late and now_s - self._ordered_s > _LATE_S:
            self._ordered = None
            return "failed"
        if now_s - self._again_s >= _AGAIN_S:
            self._send(order, now_s)
        return ""

    def _send(self, order: Shares, now_s: float) -> None:
        self._again_s = now_s
        home = self._desk.cluster.home(order.rank)
        if home is not None:
            self._desk.agents.order(order, home.rank)
