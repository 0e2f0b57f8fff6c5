"""torch's flight recorder is not read once an abort may have left pointers in it to events that are gone."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.stand_in.launch import run


def test_a_recorder_is_not_read_after_an_abort(tmp_path: Path) -> None:
    done = run(Path(__file__).with_name("abort_job.py"), [], tmp_path, ranks=2)
    assert done.exit_code == 0, done.console
    told = set(re.findall(r"rank \d, .*: \w+$", done.console, re.MULTILINE))
    assert told == {
        *(f"rank {rank}, at first: Dump" for rank in range(2)),
        "rank 0, at last: NoneType",
        "rank 1, at last: Dump",
    }, done.console
