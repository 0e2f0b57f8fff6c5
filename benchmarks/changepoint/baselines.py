"""What GREYHOUND (section 7.2) compares: a sliding window, BOCD, and BOCD with the 10 % verification; written anew.

Each takes a series and returns reports (index of the new regime, iteration of detection, ratio after /
before).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Report = tuple[int, int, float]


def sliding_window(series: Sequence[float], width: int = 10) -> list[Report]:
    """Report when the mean of the last ``width`` values leaves the median since the last report by more than 10 %."""
    reports: list[Report] = []
    begin = 0
    for now in range(len(series)):
        if now - begin < 3 * width:
            continue
        usual = float(np.median(series[begin : now + 1]))
        recent = float(np.mean(series[now - width + 1 : now + 1]))
        if abs(recent / usual - 1) > 0.10:
            begin = now - width + 1
            reports.append((begin, now, recent / usual))
    return reports


def bocd(series: Sequence[float], *, verify: bool = False, hazard: float = 1 / 250) -> list[Report]:
    """Bayesian online change points (Adams and MacKay 2007), Gaussian of unknown mean and variance.

    With a constant hazard the probability of run length 0 is the hazard itself whatever comes, so the
    threshold of 0.9 is put on the probability that the present run began within the last six values.
    ``verify``: report only when the means before and after differ by 10 %, tried again for as long as the run
    is young. Run lengths below 1e-4 are pruned.
    """
    model = _RunLengths(np.asarray(series[:20], float), hazard)
    reports: list[Report] = []
    begin = 0
    for now, value in enumerate(series):
        model.push(value)
        young = model.runs <= 6
        if now - begin < 12 or model.weights[young].sum() <= 0.9:
            continue
        run = int(model.runs[young][np.argmax(model.weights[young])])
        index = now - run + 1
        if index - begin < 3 or run < 2:
            continue
        before, after = (
            float(np.mean(series[max(begin, index - 50) : index])),
            float(np.mean(series[index : now + 1])),
        )
        ratio = after / before if before else math.inf
        if verify and abs(ratio - 1) < 0.10:
            continue
        reports.append((index, now, ratio))
        begin = index
    return reports


class _RunLengths:
    """Posterior over run lengths with a normal-gamma model, sufficient statistics per run length."""

    def __init__(self, first: NDArray[np.float64], hazard: float) -> None:
        self._hazard = hazard
        self._mean0 = float(np.mean(first))
        self._kappa0, self._alpha0 = 0.1, 1.0
        self._beta0 = max(float(np.var(first)), 1e-12 * self._mean0**2, 1e-300)
        self.runs = np.zeros(1, np.int64)
        self.weights = np.ones(1)
        self._mean = np.array([self._mean0])
        self._beta = np.array([self._beta0])
        self._log_gamma = np.zeros(0)

    def push(self, value: float) -> None:
        alpha = self._alpha0 + self.runs / 2
        kappa = self._kappa0 + self.runs
        spread = self._beta * (kappa + 1) / (alpha * kappa)
        density = self._gamma_ratio(self.runs) - 0.5 * np.log(2 * np.pi * alpha * spread)
        density -= (alpha + 0.5) * np.log1p((value - self._mean) ** 2 / (2 * alpha * spread))
        joint = self.weights * np.exp(density - density.max())
        grown = joint * (1 - self._hazard)
        fresh = joint.sum() * self._hazard
        weights = np.concatenate([[fresh], grown])
        weights /= weights.sum()
        # The value belongs to every run that grows; the run that begins after it starts from the prior.
        beta = self._beta + kappa * (value - self._mean) ** 2 / (2 * (kappa + 1))
        mean = (kappa * self._mean + value) / (kappa + 1)
        keep = weights >= 1e-4
        keep[0] = True
        self.weights = weights[keep] / weights[keep].sum()
        self.runs = np.concatenate([[0], self.runs + 1])[keep]
        self._mean = np.concatenate([[self._mean0], mean])[keep]
        self._beta = np.concatenate([[self._beta0], beta])[keep]

    def _gamma_ratio(self, runs: NDArray[np.int64]) -> NDArray[np.float64]:
        top = int(runs.max()) + 1
        if top > len(self._log_gamma):
            alphas = [self._alpha0 + run / 2 for run in range(2 * top + 64)]
            self._log_gamma = np.array([math.lgamma(alpha + 0.5) - math.lgamma(alpha) for alpha in alphas])
        return self._log_gamma[runs]
