"""Snapshots of what lies on the device: whole, held up by events only, never torn. Other seeds: the bench."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.stand_in.snapshots import trials


@pytest.mark.parametrize(
    ("part", "seed"), [("states", 2), pytest.param("waits", 5, marks=pytest.mark.long), ("kills", 2)]
)
def test_a_seed_of_the_bench(part: str, seed: int, tmp_path: Path) -> None:
    (told,) = trials(part, range(seed, seed + 1), tmp_path)
    assert (told["failed"], told["right"]) == ("", True), told
