"""One seed of each case of the checkpoint campaigns; all of them are ``make soak``."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.campaign.seeds import kept
from benchmarks.checkpoint_faults.processes import CASES, main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_one_seed(case: str, tmp_path: Path) -> None:
    assert main(["--case", case, "--seeds", "1", "--out", str(tmp_path / "results")]) == 0
    result = kept(tmp_path / "results", case)[0]
    assert result["passed"], result
