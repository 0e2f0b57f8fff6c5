"""The rings, orders pages and link tables of one incarnation's workers, held by the launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from keepstep.launch.command.placement import INCARNATION, LINKS, ORDERS, RING, RUN_DIR, Place


def path_of(descriptor: int) -> str:
    """Where other processes find a descriptor of ours."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class Rings:
    """A ring, a page and a link table for each worker; descriptors are closed by ``close``."""

    def __init__(self) -> None:
        self._rings: dict[int, int] = {}
        self._orders: dict[int, int] = {}
        self._links: dict[int, int] = {}

    def make(self, place: Place, nproc: int, records: int) -> None:
        """Make them all.

        Raises:
            KeepstepError, OSError, ImportError, ValueError: they cannot be made.
        """
        from keepstep.ring import create, link_table, orders

        for rank in range(place.first_rank, place.first_rank + nproc):
            self._rings[rank] = create(records)
            self._orders[rank] = orders.create()
            self._links[rank] = link_table.create()

    @property
    def paths(self) -> dict[int, str]:
        """Paths of the rings by rank; empty: nobody is watched."""
        return {rank: path_of(descriptor) for rank, descriptor in self._rings.items()}

    @property
    def orders(self) -> dict[int, str]:
        """Paths of the orders pages by rank."""
        return {rank: path_of(descriptor) for rank, descriptor in self._orders.items()}

    @property
    def links(self) -> dict[int, str]:
        """Paths of the link tables by rank."""
        return {rank: path_of(descriptor) for rank, descriptor in self._links.items()}

    def environment(
        self, place: Place, folder: Path, environ: Mapping[str, str]
    ) -> dict[int, dict[str, str]]:
        """What workers find them by, by local rank. ``environ``: the launcher's own."""
        from keepstep.ring import link_table

        orders, links, plugin = self.orders, self.links, link_table.plugin(environ)
        loaded = {} if plugin is None else {link_table.PLUGIN: str(plugin)}
        return {
            rank - place.first_rank: {
                RUN_DIR: str(folder),
                RING: path,
                ORDERS: orders[rank],
                INCARNATION: str(place.incarnation),
                LINKS: links[rank],
                **loaded,
            }
            for rank, path in self.paths.items()
        }

    def steps(self, rank: int) -> int:
        """Optimizer steps that a rank has made in this incarnation, also after its death; -1: nobody counts."""
        descriptor = self._orders.get(rank)
        if descriptor is None:
            return -1
        from keepstep.ring.orders import steps_made

        return steps_made(descriptor)

    def close(self) -> None:
        """Let go of them."""
        for descriptor in (*self._rings.values(), *self._orders.values(), *self._links.values()):
            os.close(descriptor)
        self._rings, self._orders, self._links = {}, {}, {}
