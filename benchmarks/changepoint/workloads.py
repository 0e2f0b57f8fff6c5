"""Synthetic iteration times with known changes: what real jobs show, without a job.

The generator knows nothing of any detector. Six kinds, each as computation fail-slows (steady iterations,
moderate factors) and communication fail-slows (noisier, heavy-tailed, correlated, larger factors); half of
the traces are healthy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["step", "drift", "jitter", "gc", "ladder", "moe"]
Variant = Literal["computation", "communication"]
KINDS: tuple[Kind, ...] = ("step", "drift", "jitter", "gc", "ladder", "moe")
VARIANTS: tuple[Variant, ...] = ("computation", "communication")
LENGTH = 400
_TOLERANCE = 20


@dataclass(frozen=True, slots=True)
class Change:
    """A change that ought to be reported: between iterations ``begin`` and ``end``, slower or faster."""

    begin: int
    end: int
    slower: bool
    gradual: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Iteration times in seconds and the changes in them; ``changes`` is empty for a healthy job."""

    seconds: NDArray[np.float64]
    changes: tuple[Change, ...]


def trace(kind: Kind, variant: Variant, seed: int, *, faulty: bool) -> Trace:
    """One reproducible trace of ``LENGTH`` iterations around one second."""
    rng = np.random.default_rng([KINDS.index(kind), VARIANTS.index(variant), seed, faulty])
    noise = _noise(rng, kind, variant)
    level = np.ones(LENGTH)
    changes: list[Change] = []
    if kind == "drift":
        _ramp(rng, level, changes, faulty)
    elif kind == "ladder":
        _ladder(rng, level, changes, faulty)
    elif faulty:
        _episode(rng, level, changes, kind, variant)
    elif kind == "step":
        level[rng.integers(120, 280) :] *= rng.choice([0.95, 1.05])
    return Trace(level * noise, tuple(changes))


def healthy_noise(name: str, cov: float, length: int, seed: int) -> NDArray[np.float64]:
    """A healthy series of mean about one: gaussian, lognormal, correlated, heavy-tailed or gc, of that variation."""
    rng = np.random.default_rng([len(name), int(1000 * cov), seed])
    white = rng.standard_normal(length)
    if name == "lognormal":
        return np.exp(cov * white)
    if name == "correlated":
        return 1 + cov * _correlated(white, 0.5)
    if name == "heavy-tailed":
        return np.maximum(0.05, 1 + cov * rng.standard_t(3, length) / np.sqrt(3))
    series = 1 + cov * white
    if name == "gc":
        series[int(rng.integers(20)) :: 20] *= 1.5
    return series


def _correlated(white: NDArray[np.float64], phi: float) -> NDArray[np.float64]:
    series = np.empty_like(white)
    last = white[0]
    for place, value in enumerate(white):
        last = phi * last + np.sqrt(1 - phi * phi) * value if place else value
        series[place] = last
    return series


def _noise(rng: np.random.Generator, kind: Kind, variant: Variant) -> NDArray[np.float64]:
    if variant == "computation":
        noise = 1 + rng.uniform(0.01, 0.025) * rng.standard_normal(LENGTH)
    else:
        cov = rng.uniform(0.02, 0.04)
        heavy = rng.standard_t(4, LENGTH) / np.sqrt(2)
        noise = np.maximum(0.2, 1 + cov * _correlated(heavy, 0.3))
    if kind == "jitter":
        # Bursts of one or two iterations, at least five healthy ones apart: more in a row would be a short fail-slow.
        begin = int(rng.integers(7, 70))
        while begin < LENGTH:
            noise[begin : begin + rng.integers(1, 3)] *= rng.uniform(1.15, 2.0)
            begin += int(rng.integers(7, 90))
    elif kind == "gc":
        period = int(rng.integers(12, 30))
        noise[int(rng.integers(period)) :: period] *= rng.uniform(1.2, 1.8)
    elif kind == "moe":
        noise *= np.exp(0.03 * _correlated(rng.standard_normal(LENGTH), 0.8))
    return noise


def _episode(
    rng: np.random.Generator, level: NDArray[np.float64], changes: list[Change], kind: Kind, variant: Variant
) -> None:
    low, high = (1.14, 2.0) if variant == "computation" else (1.2, 4.0)
    if kind == "moe":
        low = 1.3
    onset, lasts = int(rng.integers(100, 200)), int(rng.integers(60, 120))
    level[onset : onset + lasts] *= rng.uniform(low, high)
    changes.append(Change(onset, onset + _TOLERANCE, True))
    changes.append(Change(onset + lasts, onset + lasts + _TOLERANCE, False))


def _ramp(rng: np.random.Generator, level: NDArray[np.float64], changes: list[Change], faulty: bool) -> None:
    begin, lasts = int(rng.integers(100, 160)), int(rng.integers(60, 120))
    total = rng.uniform(0.18, 0.35) if faulty else rng.uniform(0.02, 0.05)
    level += total * np.clip((np.arange(LENGTH) - begin) / lasts, 0, 1)
    if faulty:
        changes.append(Change(begin, begin + lasts + 3 * _TOLERANCE, True, gradual=True))


def _ladder(
    rng: np.random.Generator, level: NDArray[np.float64], changes: list[Change], faulty: bool
) -> None:
    place = begin = int(rng.integers(100, 130))
    steps = rng.uniform(0.05, 0.08, 3) if faulty else np.array([1, -1, 1]) * rng.uniform(0.03, 0.05)
    for step in steps:
        level[place:] *= 1 + step
        last = place
        place += int(rng.integers(35, 60))
    if faulty:
        changes.append(Change(begin, last + 3 * _TOLERANCE, True, gradual=True))
