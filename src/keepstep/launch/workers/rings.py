"""What watches the workers of an incarnation: rings, orders pages and link tables of the launcher, and NCCL's shim."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from keepstep.launch.command.placement import INCARNATION, LINKS, ORDERS, RING, RUN_DIR, Place

LD_PRELOAD = "LD_PRELOAD"
SHIM = "KEEPSTEP_NCCL_SHIM"
"""Variable of the launcher that is 0 where workers are to run without the shim."""
_SEPARATORS = " :"  # characters that end a path in LD_PRELOAD and cannot be quoted
_LIBRARY = "libkeepstep_nccl.so"


def path_of(descriptor: int) -> str:
    """Where other processes find a descriptor of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class Rings:
    """A ring, an orders page and a link table for each worker."""

    def __init__(self) -> None:
        self._made: dict[str, dict[int, int]] = {"ring": {}, "orders": {}, "links": {}}  # descriptors by rank

    def make(self, place: Place, nproc: int, records: int) -> None:
        """Make them for all workers of this node. Raises KeepstepError, OSError, ImportError or ValueError."""
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


def shim() -> Path | None:
    """The path of the library that records calls of NCCL; None where it was not built."""
    native = find_spec("keepstep.ring._native")
    path = Path(native.origin).with_name(_LIBRARY) if native and native.origin else None
    return path if path and path.exists() else None


def preload(environ: Mapping[str, str], library: Path | None) -> dict[str, str]:
    """The variable that preloads ``library`` after what ``environ`` preloads: a sanitizer's runtime must come first.

    Empty where the library is not wanted, is preloaded already, or cannot be read.
    """
    before = environ.get(LD_PRELOAD, "")
    if library is None or environ.get(SHIM) == "0" or str(library) in before:
        return {}
    path = str(library)
    if any(character in path for character in _SEPARATORS):
        try:
            path = _by_descriptor(path)
        except OSError:
            return {}
    return {LD_PRELOAD: f"{before}:{path}" if before else path}


def autoloads(environ: Mapping[str, str]) -> bool:
    """Whether torch loads keepstep's part when it is imported: it is so unless the user has switched that off."""
    return environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"


@cache
def _by_descriptor(path: str) -> str:
    """A path to the same file without separators in it, which is valid while this process lives."""
    return path_of(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
