"""The rings and orders pages of one incarnation's workers, held by the launcher."""

from __future__ import annotations

import os
from pathlib import Path

from keepstep.launch.placement import INCARNATION, ORDERS, RING, RUN_DIR, Place


def path_of(descriptor: int) -> str:
    """Where other processes find a descriptor of ours."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class Rings:
    """A ring and a page for each worker; descriptors are closed by ``close``."""

    def __init__(self) -> None:
        self._rings: dict[int, int] = {}
        self._orders: dict[int, int] = {}

    def make(self, place: Place, nproc: int, records: int) -> None:
        """Make them all.

        Raises:
            KeepstepError, OSError, ImportError, ValueError: they cannot be made.
        """
        from keepstep.ring import create, orders

        for rank in range(place.first_rank, place.first_rank + nproc):
            self._rings[rank] = create(records)
            self._orders[rank] = orders.create()

    @property
    def paths(self) -> dict[int, str]:
        """Paths of the rings by rank; empty: nobody is watched."""
        return {rank: path_of(descriptor) for rank, descriptor in self._rings.items()}

    @property
    def orders(self) -> dict[int, str]:
        """Paths of the orders pages by rank."""
        return {rank: path_of(descriptor) for rank, descriptor in self._orders.items()}

    def environment(self, place: Place, folder: Path) -> dict[int, dict[str, str]]:
        """What workers find them by, by local rank."""
        orders = self.orders
        return {
            rank - place.first_rank: {
                RUN_DIR: str(folder),
                RING: path,
                ORDERS: orders[rank],
                INCARNATION: str(place.incarnation),
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
        for descriptor in (*self._rings.values(), *self._orders.values()):
            os.close(descriptor)
        self._rings, self._orders = {}, {}
