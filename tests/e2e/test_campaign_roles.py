"""A seed each of the cases whose jobs tell their own truth. The whole campaign is ``make soak``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.campaign import blame_draw, odd_draw, stuck_draw
from benchmarks.campaign.cases import CASES
from benchmarks.campaign.trial import run_trial

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(500)]


def seed_with(draw: Callable[[int], Any], kind: str, most: int) -> int:
    """The first seed of this kind with at most so many ranks."""
    return next(seed for seed in range(400) if (one := draw(seed)).kind == kind and one.nproc <= most)


@pytest.mark.parametrize(
    ("name", "draw", "kind"),
    [
        pytest.param("healthy-odd", odd_draw.draw, "upload", marks=pytest.mark.long),
        pytest.param("hang-true", stuck_draw.draw, "data", marks=pytest.mark.long),
        pytest.param("blame", blame_draw.draw, "own storage"),
    ],
)
def test_one_seed(name: str, draw: Callable[[int], Any], kind: str, tmp_path: Path) -> None:
    case = CASES[name]
    plan = case.plan(seed_with(draw, kind, 3))
    outcome = run_trial(plan, tmp_path / name)
    verdict = case.judge(plan, outcome)
    assert not verdict.why, f"{verdict.why}\n{outcome.console}"
