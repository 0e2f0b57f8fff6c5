"""How the ranks of a job are arranged: parallel sizes, every rank's coordinates, every group."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keepstep.core.errors import LayoutError

DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")

Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of tensor, context, expert, data and pipeline parallelism, and the order of dealing ranks.

    ``order`` names dimensions, the first varies fastest with the rank (Megatron's convention); dimensions
    of size 1 may be left out of it. The world size is the product of the sizes. Raises `LayoutError` for a
    size below 1, and for an order that names no dimension, names one twice or forgets one.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = "-".join(DIMENSIONS)

    def __post_init__(self) -> None:
        for dimension in DIMENSIONS:
            size = self.size(dimension)
            if size < 1:
                raise LayoutError(f"layout {self}: {dimension}={size}; every size must be an integer >= 1")
        named = self.order.split("-")
        unknown = [name for name in named if name not in DIMENSIONS]
        if unknown or len(set(named)) != len(named):
            raise LayoutError(
                f"order {self.order!r} must name each of {', '.join(DIMENSIONS)} at most once, joined by '-'"
            )
        forgotten = [name for name in DIMENSIONS if name not in named and self.size(name) > 1]
        if forgotten:
            raise LayoutError(
                f"order {self.order!r} does not place {', '.join(forgotten)}, of size above 1; add it"
            )

    @classmethod
    def declared(cls, text: str) -> ParallelLayout:
        """The layout of ``"tp2-pp4-dp8"``: sizes not named are 1, ranks are dealt in the order of the names.

        Raises:
            LayoutError: the text is no such list.
        """
        sizes: dict[str, int] = {}
        for part in text.split("-"):
            match = re.fullmatch(r"([a-z]+)=?(\d+)", part.strip(), re.ASCII)
            if match is None or match[1] not in DIMENSIONS or match[1] in sizes:
                raise LayoutError(f"layout {text!r}: cannot read {part!r}; write it like tp2-pp4-dp8")
            sizes[match[1]] = int(match[2])
        return cls(order="-".join(sizes), **sizes)

    def __str__(self) -> str:
        return "-".join(f"{name}{self.size(name)}" for name in DIMENSIONS if self.size(name) != 1) or "dp1"

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the sizes."""
        return math.prod(self.size(name) for name in DIMENSIONS)

    def size(self, dimension: str) -> int:
        """Size of one dimension. Raises `LayoutError` for an unknown name."""
        if dimension not in DIMENSIONS:
            raise LayoutError(f"no dimension {dimension!r}; there are {', '.join(DIMENSIONS)}")
        return int(getattr(self, dimension))

    def check_world(self, world_size: int) -> None:
        """Raise `LayoutError` unless the job has exactly as many ranks as the layout."""
        if world_size != self.world_size:
            factors = " x ".join(f"{name}={self.size(name)}" for name in DIMENSIONS)
            raise LayoutError(
                f"{factors} makes {self.world_size} ranks, but the job has {world_size}; "
                "change a size or the world size"
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's index in every dimension. Raises `LayoutError` for a rank that the layout does not have."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank {rank} is outside the layout {self}, which has ranks 0 to {self.world_size - 1}"
            )
        return {name: rank // stride % self.size(name) for name, stride in self._strides().items()}

    def all_coordinates(self) -> dict[str, Ranks]:
        """Per dimension an array of shape (world size,): the index of every rank."""
        ranks = np.arange(self.world_size, dtype=np.int64)
        return {name: ranks // stride % self.size(name) for name, stride in self._strides().items()}

    def groups(self, dimension: str) -> Ranks:
        """All groups over one dimension: array (groups, members), both in ascending order of ranks."""
        members = np.arange(self.size(dimension)) * self._strides()[dimension]
        firsts = np.flatnonzero(self.all_coordinates()[dimension] == 0)
        return firsts[:, None] + members[None, :]

    def group_of(self, rank: int, dimension: str) -> tuple[int, ...]:
        """The members of the rank's own group over one dimension, ascending."""
        size, stride = self.size(dimension), self._strides()[dimension]
        first = rank - self.coordinates(rank)[dimension] * stride
        return tuple(range(first, first + size * stride, stride))

    def _strides(self) -> dict[str, int]:
        """For each dimension, in the order of dealing, the difference between the ranks of neighbouring indices."""
        named = self.order.split("-")
        strides: dict[str, int] = {}
        stride = 1
        for name in [*named, *(name for name in DIMENSIONS if name not in named)]:
            strides[name] = stride
            stride *= self.size(name)
        return strides
