"""One seed of two cases of the checkpoint campaign over four hosts; all of them are ``make soak``."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.campaign.seeds import kept
from benchmarks.checkpoint_faults.nodes import main
from tests.e2e import testbed as beds

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("two-nodes", marks=pytest.mark.long),
        pytest.param("node-at-restore", marks=pytest.mark.long),
    ],
)
def test_one_seed(case: str, tmp_path: Path) -> None:
    reason = beds.missing()
    if reason:
        pytest.skip(reason)
    assert main(["--case", case, "--seeds", "1", "--out", str(tmp_path / "results")]) == 0
    result = kept(tmp_path / "results", case)[0]
    assert result["passed"], result
