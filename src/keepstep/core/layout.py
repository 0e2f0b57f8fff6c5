"""How the ranks of a job are arranged: parallel sizes, every rank's coordinates, every group."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keepstep.core.errors import LayoutError

DIMENSIONS = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"

Ranks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of tensor, context, expert, data and pipeline parallelism, and the order of dealing ranks.

    ``order`` names dimensions, the first varies fastest with the rank (Megatron's convention); dimensions
    of size 1 may be left out of it. The world size is the product of the sizes. Raises `LayoutError` when
    sizes or order cannot be.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER

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
    def parse(cls, text: str, order: str = DEFAULT_ORDER) -> ParallelLayout:
        """The layout of ``"tp2-pp4-dp8"``; sizes not named are 1. Raises `LayoutError`."""
        sizes: dict[str, int] = {}
        for part in text.split("-"):
            match = re.fullmatch(r"([a-z]+)=?(\d+)", part.strip(), re.ASCII)
            if match is None or match[1] not in DIMENSIONS or match[1] in sizes:
                raise LayoutError(f"layout {text!r}: cannot read {part!r}; write it like tp2-pp4-dp8")
            sizes[match[1]] = int(match[2])
        return cls(order=order, **sizes)

    @classmethod
    def declared(cls, text: str) -> ParallelLayout:
        """As ``parse``, but the ranks are dealt in the order in which the sizes are named. Raises `LayoutError`."""
        named = re.findall(r"[a-z]+", text)
        rest = [name for name in DIMENSIONS if name not in named]
        return cls.parse(text, "-".join([*(name for name in named if name in DIMENSIONS), *rest]))

    def __str__(self) -> str:
        return "-".join(f"{name}{self.size(name)}" for name in DIMENSIONS if self.size(name) != 1) or "dp1"

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the sizes."""
        return math.prod(self.size(name) for name in DIMENSIONS)

    def size(self, dimension: str) -> int:
        """Size of one dimension. Raises `LayoutError` for a name that is none."""
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
        """The rank's index in every dimension."""
        self._check_rank(rank)
        return {name: rank // stride % self.size(name) for name, stride in self._strides().items()}

    def all_coordinates(self) -> dict[str, Ranks]:
        """Per dimension an array of shape (world size,): the index of every rank."""
        ranks = np.arange(self.world_size, dtype=np.int64)
        return {name: ranks // stride % self.size(name) for name, stride in self._strides().items()}

    def rank_of(self, coordinates: Mapping[str, int]) -> int:
        """The rank at ``coordinates``; dimensions left out count as index 0."""
        strides = self._strides()
        rank = 0
        for name, index in coordinates.items():
            if not 0 <= index < self.size(name):
                raise LayoutError(
                    f"{name}={index} is outside the layout {self}, whose {name} is {self.size(name)}"
                )
            rank += index * strides[name]
        return rank

    def groups(self, dimensions: str) -> Ranks:
        """All groups over one dimension (``"dp"``) or several (``"dp-cp"``): array (groups, members).

        Members and groups are in the layout's order, as Megatron numbers them.
        """
        inside = self._split(dimensions)
        outside = [name for name in self._ordered() if name not in inside]
        return self._offsets(outside)[:, None] + self._offsets(inside)[None, :]

    def group_of(self, rank: int, dimensions: str) -> tuple[int, ...]:
        """The members of the rank's own group over ``dimensions``."""
        inside = self._split(dimensions)
        here, strides = self.coordinates(rank), self._strides()
        first = rank - sum(here[name] * strides[name] for name in inside)
        return tuple(int(member) for member in self._offsets(inside) + first)

    def _split(self, dimensions: str) -> list[str]:
        wanted = dimensions.split("-")
        for name in wanted:
            self.size(name)
        return [name for name in self._ordered() if name in wanted]

    def _offsets(self, names: list[str]) -> Ranks:
        """Ranks with every combination of indices of ``names`` and 0 elsewhere, the first varying fastest."""
        strides = self._strides()
        offsets = np.zeros(1, dtype=np.int64)
        for name in names:
            steps = np.arange(self.size(name), dtype=np.int64) * strides[name]
            offsets = (steps[:, None] + offsets[None, :]).ravel()
        return offsets

    def _ordered(self) -> list[str]:
        named = self.order.split("-")
        return named + [name for name in DIMENSIONS if name not in named]

    def _strides(self) -> dict[str, int]:
        strides: dict[str, int] = {}
        stride = 1
        for name in self._ordered():
            strides[name] = stride
            stride *= self.size(name)
        return strides

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank {rank} is outside the layout {self}, which has ranks 0 to {self.world_size - 1}"
            )
