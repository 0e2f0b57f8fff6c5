"""The shares of micro-batches that the job's replicas have: equal, or as the controller orders when one is slow.

What is ordered stands on the first rank's orders page. That rank gives it to all others in a broadcast that is begun in
one step and used in the next: so all divide a step alike, whatever happens to the order on its way, and nobody waits.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from keepstep.core.errors import RingError
from keepstep.core.microbatches import MOST_MICROBATCHES, equal_shares, fits, share_of

if TYPE_CHECKING:
    from keepstep.ring.orders import OrdersPage

ORDERED = "KEEPSTEP_MICROBATCHES"  # set to 1 in all workers of a job whose shares may be ordered


class Shares:
    """Of one incarnation of the training."""

    def __init__(self, rank: int, incarnation: int) -> None:
        self._rank, self._incarnation = rank, incarnation
        self._page = _page()
        self._group: Any = _cpu_group() if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._hears = self._group is not None and _agreed(os.environ.get(ORDERED) == "1", self._group)
        self._ordered: Sequence[int] = ()  # heard by all
        self.number = 0  # of the order that all heard last; 0: none
        self._seen = 0  # number on the page that was read last
        self._found: tuple[int, list[int]] | None = None  # on it, for this incarnation
        self._divided: tuple[int, ...] = ()  # what led to the replica's own, and whether it is as ordered
        self._own, self._in_force = range(0), False
        self._told: dict[str, int] = {}
        self._step = -1
        self._news: torch.Tensor | None = None  # number and shares, on their way to the next step
        self._arrives: Any = None

    def of(
        self,
        step: int,
        count: int,
        replica: int,
        replicas: int,
        multiple_of: int,
        at_most: int,
        movable: bool = True,
    ) -> range:
        """The replica's micro-batches in ``step``; all ranks call it, as often in each.

        ``movable``: whether unequal shares may be given on; the first rank's counts.
        """
        if self._hears:
            self._receive()
            self._send(count, replicas, multiple_of, at_most, movable)
        divided = count, replica, replicas, multiple_of, at_most, self.number
        if divided != self._divided:  # thousands of replicas take milliseconds
            ordered = fits(self._ordered, count, replicas, multiple_of, at_most)
            shares = self._ordered if ordered else equal_shares(count, replicas, multiple_of)
            self._divided, self._own, self._in_force = divided, share_of(replica, shares), ordered
        self._tell(
            step,
            {
                "count": count,
                "replica": replica,
                "replicas": replicas,
                "multiple_of": multiple_of,
                "at_most": at_most,
                "number": self.number if self._in_force else 0,
                "share": len(self._own),
                "movable": movable,
            },
        )
        return self._own

    def finish(self) -> None:
        """The training is over: what is on its way arrives."""
        if self._hears:
            self._receive()

    def _receive(self) -> None:
        if self._arrives is None or self._news is None:
            return
        self._arrives.wait()
        self._arrives = None
        if (number := int(self._news[0])) != self.number:
            self.number, self._ordered = number, cast("list[int]", cast("Any", self._news[1:]).tolist())

    def _send(self, count: int, replicas: int, multiple_of: int, at_most: int, movable: bool) -> None:
        if self._news is None or len(self._news) != replicas + 1:
            self._news = torch.zeros(replicas + 1, dtype=torch.int64, device="cpu")
        if self._rank == 0:
            self._read()
            if movable and self._found is not None and self._found[0] != int(self._news[0]):
                number, shares = self._found  # they may be for another count, that comes again
                if fits(shares, count, replicas, multiple_of, at_most):
                    self._news.copy_(torch.tensor([number, *shares], dtype=torch.int64, device="cpu"))
        self._arrives = dist.broadcast(self._news, 0, group=self._group, async_op=True)

    def _read(self) -> None:
        """Note what was ordered since the last look, if it is for this incarnation and possible."""
        if self._page is None or (found := self._page.shares(self._seen)) is None:
            return
        self._seen, body = found
        shares = body.get("shares")
        if body.get("incarnation") != self._incarnation or not isinstance(shares, list):
            return
        numbers = cast("list[Any]", shares)
        if self._seen < 1 << 62 and all(type(one) is int and 0 < one <= MOST_MICROBATCHES for one in numbers):
            self._found = self._seen, cast("list[int]", numbers)

    def _tell(self, step: int, split: dict[str, int]) -> None:
        first, self._step = step != self._step, step  # an evaluation in the same step is not told of
        if first and split != self._told and self._page is not None:
            self._told = split
            self._page.put_split({"incarnation": self._incarnation, "step": step, **split})


def _page() -> OrdersPage | None:
    where = os.environ.get("KEEPSTEP_ORDERS")
    if not where:
        return None
    from keepstep.ring.orders import OrdersPage

    try:
        return OrdersPage(where)
    except RingError:
        return None  # the probe has said so


def _agreed(wish: bool, group: Any) -> bool:
    """Whether it is the wish of all ranks: nodes may have been started in different ways."""
    least = torch.tensor([int(wish)], device="cpu")
    cast("Any", dist).all_reduce(least, dist.ReduceOp.MIN, group=group)
    return bool(least)


def _cpu_group() -> Any:
    """One in which tensors in main memory are sent."""
    world: Any = dist.group.WORLD
    try:
        world._get_backend(torch.device("cpu"))
    except RuntimeError:
        return cast("Any", dist).new_group(backend="gloo")
    return world
