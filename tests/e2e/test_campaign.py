"""One seed of the campaign's longer cases; the others are in ``test_watch``. The whole campaign is ``make soak``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks._campaign_cases import CASES
from benchmarks._campaign_trial import run_trial

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param("slow-link", 1, marks=[pytest.mark.root, needs_root]),
        ("pauses", 0),
        ("iteration-time", 5),
    ],
)
def test_one_seed(name: str, seed: int, tmp_path: Path) -> None:
    case = CASES[name]
    plan = case.plan(seed)
    outcome = run_trial(plan, tmp_path / name)
    verdict = case.judge(plan, outcome)
    assert not verdict.why, f"{verdict.why}\n{outcome.console}"
