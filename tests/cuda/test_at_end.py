"""A rank that hangs in its last step is named, though the others have left their loops."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from benchmarks.campaign.trial import read_incidents
from benchmarks.stand_in.faults import Fault, Phase
from benchmarks.stand_in.launch import TRAIN, start

STEPS, HUNG = 20, 1


@pytest.mark.long
@pytest.mark.parametrize("where", ["backward", "optimizer"])
def test_a_rank_that_hangs_in_its_last_step_is_named(where: Phase, tmp_path: Path) -> None:
    words = ["--layout", "ddp", "--steps", str(STEPS)]
    fault = Fault("hang", rank=HUNG, step=STEPS - 1, where=where)
    with start(TRAIN, words, tmp_path, ranks=4, kernel_us=4000, faults=[fault]) as job:
        until = time.monotonic() + 120
        while not (told := read_incidents(tmp_path / "run")) and time.monotonic() < until:
            assert not job.is_over(), job.console()
            time.sleep(0.5)
    assert told, job.console()
    assert (told[0]["kind"], [one["rank"] for one in told[0]["culprits"]]) == ("hang", [HUNG])
    assert where in told[0]["culprits"][0]["stage"]
