"""The shares of micro-batches that the job's replicas have: equal, or as the controller orders when one is slow.

An order stands on the first rank's orders page. That rank sends it to all others in a broadcast that is begun in one
step and used in the next, so that all ranks divide a step alike, whenever the order comes, and none waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from keepstep.core.errors import RingError
from keepstep.core.microbatch_shares import MOST_MICROBATCHES, equal_shares, fits, share_of

if TYPE_CHECKING:
    from keepstep.ring.orders import OrdersPage

ORDERED = "KEEPSTEP_MICROBATCHES"
"""Variable that is 1 in all workers of a job whose shares the controller may order."""


class Shares:
    """The shares in one incarnation of the training."""

    def __init__(self, rank: int, incarnation: int) -> None:
        self._rank, self._incarnation = rank, incarnation
        self._page = _page()
        self._group: Any = _cpu_group() if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._hears = self._group is not None and _agreed(os.environ.get(ORDERED) == "1", self._group)
        self._ordered: Sequence[int] = ()  # shares of the newest order that all ranks have
        self.number = 0  # number of that order; 0: there is none
        self._seen = 0  # number of the order that was read from the page last
        self._found: tuple[int, list[int]] | None = None  # the newest order on the page for this incarnation
        self._divided: tuple[int, ...] = ()  # arguments of the last division
        self._own, self._in_force = range(0), False  # its result, and whether it is as ordered
        self._told: dict[str, int] = {}
        self._step = -1
        self._news: torch.Tensor | None = None  # number and shares that are broadcast for the next step
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
        """The replica's micro-batches in ``step``; all ranks call it equally often.

        ``movable``: whether shares may become unequal; the first rank's value counts.
        """
        if self._hears:
            self._receive()
            self._send(count, replicas, multiple_of, at_most, movable)
        divided = count, replica, replicas, multiple_of, at_most, self.number
        if divided != self._divided:  # dividing among thousands of replicas takes milliseconds
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
        """Wait for the last broadcast, because the training is over."""
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
                number, shares = self._found  # an order for another count waits until that comes again
                if fits(shares, count, replicas, multiple_of, at_most):
                    self._news.copy_(torch.tensor([number, *shares], dtype=torch.int64, device="cpu"))
        self._arrives = dist.broadcast(self._news, 0, group=self._group, async_op=True)

    def _read(self) -> None:
        """Note the order that has come since the last call, if it is valid and for this incarnation."""
        if self._page is None or (found := self._page.shares.newest(self._seen)) is None:
            return
        self._seen, body = found
        shares = body.get("shares")
        if body.get("incarnation") != self._incarnation or not isinstance(shares, list):
            return
        numbers = cast("list[Any]", shares)
        if self._seen < 1 << 62 and all(type(one) is int and 0 < one <= MOST_MICROBATCHES for one in numbers):
            self._found = self._seen, cast("list[int]", numbers)

    def _tell(self, step: int, split: dict[str, int]) -> None:
        first, self._step = step != self._step, step  # only the first division of a step is told
        if first and split != self._told and self._page is not None:
            self._told = split
            self._page.split.add({"incarnation": self._incarnation, "step": step, **split})


def _page() -> OrdersPage | None:
    where = os.environ.get("KEEPSTEP_ORDERS")
    if not where:
        return None
    from keepstep.ring.orders import OrdersPage

    try:
        return OrdersPage(where)
    except RingError:
        return None  # the probe has warned of it


def _agreed(wish: bool, group: Any) -> bool:
    """Whether all ranks wish it; nodes may have been started with different flags."""
    least = torch.tensor([int(wish)], device="cpu")
    cast("Any", dist).all_reduce(least, dist.ReduceOp.MIN, group=group)
    return bool(least)


def _cpu_group() -> Any:
    """A group that sends tensors in main memory: the world where its backend can, else a new one of Gloo."""
    world: Any = dist.group.WORLD
    try:
        world._get_backend(torch.device("cpu"))
    except RuntimeError:
        return cast("Any", dist).new_group(backend="gloo")
    return world
