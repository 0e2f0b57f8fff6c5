"""How the node's ranks divide micro-batches, for the controller; the shares that it orders, onto a rank's page."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from keepstep.core.errors import RingError
from keepstep.core.microbatches import Split
from keepstep.ring.orders import OrdersPage
from keepstep.wire.messages import Shares, Splits

logger = logging.getLogger("keepstep.agent")


class Microbatches:
    """Of the ranks of one node. ``pages``: paths of their orders pages."""

    def __init__(self, pages: Mapping[int, str], node_rank: int) -> None:
        self._paths = dict(sorted(pages.items()))
        self._node_rank = node_rank
        self._pages: dict[int, OrdersPage] = {}
        self._told: dict[int, int] = {}

    def again(self) -> None:
        """A new controller is to hear all of it."""
        self._told.clear()

    def look(self) -> Splits | None:
        """What ranks have changed since the last look; cheap while that is nothing."""
        found: list[Split] = []
        for rank in self._paths:
            try:
                split = self._page(rank).split(self._told.get(rank, 0))
            except RingError:
                continue
            if split is None:
                continue
            number, body = split
            if (told := _checked(rank, body)) is not None:
                found.append(told)
                self._told[rank] = number
        return Splits(self._node_rank, tuple(found)) if found else None

    def order(self, shares: Shares) -> None:
        """Put what was ordered where its rank reads it."""
        if shares.rank not in self._paths:
            return
        try:
            body = {"incarnation": shares.incarnation, "shares": list(shares.shares)}
            self._page(shares.rank).put_shares(shares.number, body)
        except RingError as error:
            logger.warning("rank %d is not told its micro-batches: %s", shares.rank, error)

    def close(self) -> None:
        """Let go of the pages."""
        for page in self._pages.values():
            page.close()
        self._pages.clear()

    def _page(self, rank: int) -> OrdersPage:
        page = self._pages.get(rank)
        if page is None:
            page = self._pages[rank] = OrdersPage(self._paths[rank])
        return page


def _checked(rank: int, body: dict[str, Any]) -> Split | None:
    """What a worker wrote, if it is whole and possible."""
    try:
        split = msgspec.convert(body | {"rank": rank}, Split)
    except msgspec.ValidationError:
        return None
    return split if all(0 <= getattr(split, field.name) < 1 << 62 for field in fields(split)) else None
