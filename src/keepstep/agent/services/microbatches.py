"""Reports how the node's ranks divide micro-batches, and writes the shares that the controller orders to a page."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from keepstep.agent.services.holds import RankPages
from keepstep.core.errors import RingError
from keepstep.core.microbatch_shares import Split
from keepstep.wire.messages import Shares, Splits

logger = logging.getLogger("keepstep.agent")


class Microbatches:
    """Micro-batches of the ranks of one node."""

    def __init__(self, pages: Mapping[int, str], node_rank: int) -> None:
        """``pages``: paths of the orders pages by rank."""
        self._node_rank = node_rank
        self._pages = RankPages(pages)
        self._told: dict[int, int] = {}  # number of the split that was sent last, by rank

    def again(self) -> None:
        """Report all splits again, because the controller is a new one."""
        self._told.clear()

    def look(self) -> Splits | None:
        """The splits that ranks have changed since the last call, if any."""
        found: list[Split] = []
        for rank in self._pages.paths:
            try:
                split = self._pages[rank].split(self._told.get(rank, 0))
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
        """Write the ordered shares to the page of their rank, if it is on this node."""
        if shares.rank not in self._pages.paths:
            return
        try:
            body = {"incarnation": shares.incarnation, "shares": list(shares.shares)}
            self._pages[shares.rank].put_shares(shares.number, body)
        except RingError as error:
            logger.warning("rank %d is not told its micro-batches: %s", shares.rank, error)

    def close(self) -> None:
        """Close the pages."""
        self._pages.close()


def _checked(rank: int, body: dict[str, Any]) -> Split | None:
    """The split that a worker wrote; None if it is incomplete or impossible."""
    try:
        split = msgspec.convert(body | {"rank": rank}, Split)
    except msgspec.ValidationError:
        return None
    return split if all(0 <= getattr(split, field.name) < 1 << 62 for field in fields(split)) else None
