"""How durations vary, as recorded: factors on a block's usual time.

The tables are quantiles of trace AR of ByteDance's StragglerAnalysis samples (Apache-2.0; 16 ranks, 44 steps, 45,056
forward and backward blocks): a rank's pace in a step is the median of its blocks in that step over that of all its
steps; what is left of each block over that pace is the block's own factor.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LEVELS = (
    0.0, 0.03125, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.96875, 0.99, 0.995, 0.999, 0.9999, 1.0
)  # fmt: skip
_PACE = (
    0.9552, 0.9751, 0.9903, 0.996, 0.9984, 1.0, 1.0017, 1.0038, 1.0062, 1.0112, 1.0136, 1.0151, 1.0256, 1.0445, 1.047
)  # fmt: skip
_BLOCK = (
    0.9127, 0.9652, 0.9785, 0.9883, 0.9953, 1.0, 1.0046, 1.0108, 1.0196, 1.0358, 1.0434, 1.0485, 1.0545, 1.0661, 1.1996
)  # fmt: skip
_POOL = 1 << 18


class Jitter:
    """Factors drawn from the tables. ``scale``: 0 none, 1 as recorded. The same seed gives the same draws in order."""

    def __init__(self, seed: int, scale: float = 1.0) -> None:
        self._random = np.random.default_rng(seed)
        self._scale = scale
        self._pool = self._draw(_BLOCK, _POOL)

    def pace(self, shape: tuple[int, ...]) -> Floats:
        """One factor for each (step, rank)."""
        return self._draw(_PACE, shape)

    def blocks(self, shape: tuple[int, ...]) -> Floats:
        """One factor for each block: a random stretch of a pool of draws, which is far cheaper than drawing."""
        size = int(np.prod(shape))
        if size > len(self._pool) // 2:
            self._pool = self._draw(_BLOCK, 4 * size)
        begin = int(self._random.integers(len(self._pool) - size + 1))
        return np.reshape(self._pool[begin : begin + size], shape)

    def _draw(self, table: tuple[float, ...], shape: int | tuple[int, ...]) -> Floats:
        if self._scale == 0:
            return np.ones(shape)
        return 1.0 + self._scale * (np.interp(self._random.random(shape), _LEVELS, table) - 1.0)
