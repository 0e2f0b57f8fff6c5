"""Confidence intervals: Wilson's of a share, Student's t of a mean."""

from __future__ import annotations

import math
import statistics

# 97.5 % quantiles of Student's t for 1 to 15 degrees of freedom; the last stands for more.
_T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def wilson(passed: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % Wilson score interval of a share."""
    if total == 0:
        return 0.0, 1.0
    share, square = passed / total, z * z
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = z / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def interval(means: list[float]) -> tuple[float, float, float]:
    """Mean of independent runs' means and its 95 % interval (Student's t)."""
    mean = statistics.fmean(means)
    half = _T_95[min(len(means) - 1, len(_T_95)) - 1] * statistics.stdev(means) / len(means) ** 0.5
    return mean, mean - half, mean + half
