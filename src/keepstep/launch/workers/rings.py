"""The rings, orders pages and link tables of one incarnation's workers, held by the launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from keepstep.launch.command.placement import INCARNATION, LINKS, ORDERS, RING, RUN_DIR, Place


def path_of(descriptor: int) -> str:
    """Where other processes find a descriptor of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class Rings:
    """A ring, an orders page and a link table for each worker."""

    def __init__(self) -> None:
        self._made: dict[str, dict[int, int]] = {"ring": {}, "orders": {}, "links": {}}  # descriptors by rank

    def make(self, place: Place, nproc: int, records: int) -> None:
        """Make them for all workers of this node.

        Raises:
            KeepstepError, OSError, ImportError, ValueError: they cannot be made.
        """
        from keepstep.ring import create, link_table, orders

        for rank in range(place.first_rank, place.first_rank + nproc):
            self._made["ring"][rank] = create(records)
            self._made["orders"][rank] = orders.create()
            self._made["links"][rank] = link_table.create()

    @property
    def pages(self) -> dict[str, dict[int, str]]:
        """Paths by rank, by the agent's flag: ``ring``, ``orders`` and ``links``."""
        return {
            kind: {rank: path_of(descriptor) for rank, descriptor in made.items()}
            for kind, made in self._made.items()
        }

    @property
    def paths(self) -> dict[int, str]:
        """Paths of the rings by rank; empty: nobody is watched."""
        return self.pages["ring"]

    def environment(
        self, place: Place, folder: Path, environ: Mapping[str, str]
    ) -> dict[int, dict[str, str]]:
        """Variables by which workers find them, by local rank. ``environ``: the launcher's own."""
        from keepstep.ring import link_table

        pages, plugin = self.pages, link_table.plugin(environ)
        loaded = {} if plugin is None else {link_table.PLUGIN: str(plugin)}
        return {
            rank - place.first_rank: {
                RUN_DIR: str(folder),
                RING: path,
                ORDERS: pages["orders"][rank],
                INCARNATION: str(place.incarnation),
                LINKS: pages["links"][rank],
                **loaded,
            }
            for rank, path in pages["ring"].items()
        }

    def steps(self, rank: int) -> int:
        """Optimizer steps that a rank has made in this incarnation, also after its death; -1: nobody counts."""
        descriptor = self._made["orders"].get(rank)
        if descriptor is None:
            return -1
        from keepstep.ring.orders import steps_made

        return steps_made(descriptor)

    @property
    def all_steps(self) -> int:
        """Steps of all ranks of this node together; 0 or less: none is known."""
        return sum(self.steps(rank) for rank in self._made["orders"])

    def close(self) -> None:
        """Close all descriptors."""
        for made in self._made.values():
            for descriptor in made.values():
                os.close(descriptor)
            made.clear()
