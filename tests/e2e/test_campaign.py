"""One seed of the campaign's longer cases; the others are in ``test_watch``. The whole campaign is ``make soak``."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.campaign.cases import CASES
from benchmarks.campaign.trial import run_trial
from tests.e2e import testbed

pytestmark = [pytest.mark.e2e, pytest.mark.quiet, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param("slow-link", 1, marks=[pytest.mark.root, pytest.mark.long]),
        pytest.param("pauses", 0, marks=pytest.mark.long),
        pytest.param("iteration-time", 5, marks=pytest.mark.long),
    ],
)
def test_one_seed(name: str, seed: int, tmp_path: Path) -> None:
    case = CASES[name]
    if name == "slow-link" and (reason := testbed.missing()):
        pytest.skip(reason)
    plan = case.plan(seed)
    outcome = run_trial(plan, tmp_path / name)
    verdict = case.judge(plan, outcome)
    assert not verdict.why, f"{verdict.why}\n{outcome.console}"
