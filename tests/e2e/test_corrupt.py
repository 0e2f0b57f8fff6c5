"""A bit is turned over in a real job of three ranks: the rank is named, all go back, the losses are undisturbed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.corrupt.real import carried_out, drawn

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_bit_is_found_and_the_training_is_that_of_an_undisturbed_run(ranks: int, tmp_path: Path) -> None:
    plan = replace(drawn("after", random.Random(f"e2e:{ranks}")), ranks=ranks, rank=1, killed=0)
    judged = carried_out(plan, tmp_path)
    assert not judged.why, f"{judged.why}\n{judged.said}"
