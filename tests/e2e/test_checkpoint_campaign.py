"""One seed of each case of the checkpoint campaigns; all of them are ``make soak``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.checkpoint_faults.__main__ import CASES, main

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


@pytest.mark.parametrize("case", CASES)
def test_one_seed(case: str, tmp_path: Path) -> None:
    assert main(["--case", case, "--seeds", "1", "--out", str(tmp_path / "results")]) == 0
    result = json.loads((tmp_path / "results" / case / "seed-000.json").read_text())
    assert result["passed"], result
