"""What healthy iterations look like: a sorted window of values and how strongly neighbours resemble each other."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

_FAR = 8  # iterations of the longer of the two lags


class SortedWindow:
    """The last ``size`` values, in order of arrival and sorted."""

    __slots__ = ("order", "size", "values")

    def __init__(self, size: int) -> None:
        self.size = size
        self.order: deque[tuple[int, float]] = deque()
        self.values: list[float] = []

    def __len__(self) -> int:
        return len(self.values)

    def push(self, value: float, index: int) -> None:
        """Add a value; the oldest leaves once there are more than ``size``."""
        self.order.append((index, value))
        insort(self.values, value)
        if len(self.order) > self.size:
            _, old = self.order.popleft()
            del self.values[bisect_left(self.values, old)]

    def median(self) -> float:
        """Middle of the values; NaN when there are none."""
        n = len(self.values)
        if not n:
            return math.nan
        return self.values[n // 2] if n % 2 else (self.values[n // 2 - 1] + self.values[n // 2]) / 2

    def scale(self, factor: float) -> None:
        """Multiply every value by a positive ``factor``."""
        self.order = deque((index, value * factor) for index, value in self.order)
        self.values = [value * factor for value in self.values]

    def clear(self) -> None:
        self.order.clear()
        self.values.clear()


class Correlation:
    """Correlation of residuals at two lags, each residual clipped at 2.5 scales so that spikes do not decide it."""

    __slots__ = ("_count", "_far", "_near", "_scores", "_square")

    def __init__(self) -> None:
        # Five residuals' worth of belief in some correlation: twenty iterations cannot show that there is none.
        self._near, self._far = 0.3, 0.0
        self._square = 1.0
        self._count = 0
        self._scores: deque[float] = deque([0.0] * _FAR, maxlen=_FAR)

    def push(self, residual: float, scale: float) -> None:
        """Take the next residual, in units in which ``scale`` is the noise's standard deviation."""
        if scale <= 0:
            return
        score = min(2.5, max(-2.5, residual / scale))
        self._count = min(self._count + 1, 1000)
        weight = 1 / (self._count + 5)
        self._near += (score * self._scores[-1] - self._near) * weight
        self._far += (score * self._scores[0] - self._far) * weight
        self._square += (score * score - self._square) * weight
        self._scores.append(score)

    def rates(self) -> tuple[float, float]:
        """How the correlation falls from lag to lag: as lag 1 alone shows it, and as the two lags together do."""
        margin = 0.5 / math.sqrt(self._count + 5)
        near = min(0.97, self._near / self._square + margin)
        if near <= 0:
            return 0.0, 0.0
        far = self._far / self._square - 1.0 / math.sqrt(self._count + 5)
        return near, min(0.99, (far / near) ** (1 / (_FAR - 1))) if far > 0 else 0.0


def inflation(rates: tuple[float, float], length: int) -> float:
    """How much more the mean of ``length`` residuals varies than if they were independent.

    The correlation is taken to fall geometrically, at the slower of two ``rates`` (`Correlation.rates`): white noise on
    top of a slow wander hides in lag 1.
    """
    near, slow = rates
    slower = max(near, slow)
    # The sum over all lags of (1 - lag / length) * slower ** lag.
    rest = 1 - slower
    total = slower * (length * rest - (1 - slower**length)) / (length * rest * rest)
    return 1 + 2 * total * near / slower if near > 0 else 1.0
