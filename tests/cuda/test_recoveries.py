"""A job of the bench for each way: four ranks, three faults one after the other. Other seeds: the bench."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.gpu.recovery import FAULTS
from benchmarks.stand_in.recoveries import WAYS, Plain, trial


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("way", "seed"), [("standbys", 0), ("in-place", 1)])
def test_a_job_recovers_three_times_and_no_bit_of_a_loss_differs(way: str, seed: int, tmp_path: Path) -> None:
    told = trial(WAYS[way], seed, Plain(), tmp_path)
    assert (told["failed"], told["differing"]) == ("", 0), told
    assert {one["what"] for one in told["faults"]} == set(FAULTS)
    assert all(one["seconds"] > 0 for one in told["faults"])
