"""C code that keeps the interpreter's lock for good: its rank is named as one that hangs on its host."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from benchmarks.stand_in.faults import Fault, Phase
from benchmarks.stand_in.launch import TRAIN, start


@pytest.mark.long
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_whose_interpreter_is_held_is_named_by_what_it_has_called(
    tmp_path: Path, where: Phase
) -> None:
    fault = Fault("hold", rank=1, step=40, where=where)
    words = ["--layout", "ddp", "--steps", "400"]
    with start(TRAIN, words, tmp_path, ranks=3, faults=[fault], kernel_us=500) as job:
        until = time.monotonic() + 110
        while time.monotonic() < until and not re.search(r"HANG .*(\n.+)*\n *next ", job.console()):
            time.sleep(0.5)
        console = job.console()
    assert re.search(rf"HANG .*\nculprit +rank 1 +\S+ +asleep in {where}; never entered group 0 ", console), (
        console
    )
    assert re.search(r"victims +ranks 0,2 waiting", console), console
    assert "does not answer" not in console
    assert "flight recorder does not tell" not in console
