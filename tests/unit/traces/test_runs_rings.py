"""Live rings are those of a run that lives, and is seen from here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from keepstep.core.process_mark import process_mark
from keepstep.traces.runs import Run


def described(folder: Path, **more: Any) -> Run:
    """A run whose live ring is a path that leads to some file now."""
    (folder / "somebodys").touch()
    record = {
        "host": os.uname().nodename,
        "launcher": process_mark(os.getpid()),
        "rings": {"0": str(folder / "somebodys")},
    }
    (folder / "run.json").write_text(json.dumps(record | more))
    (folder / "rings").mkdir()
    (folder / "rings" / "rank-00000.ring").touch()
    return Run(folder)


def test_the_ring_of_a_run_that_lives_is_read(tmp_path: Path) -> None:
    assert described(tmp_path).rings() == {0: tmp_path / "somebodys"}


def test_after_its_end_elsewhere_or_under_a_reused_number_only_saved_rings_are_its_own(
    tmp_path: Path,
) -> None:
    saved = {0: tmp_path / "rings" / "rank-00000.ring"}
    run = described(tmp_path)
    (tmp_path / "end.json").write_text("{}")
    assert run.rings() == saved
    for number, more in enumerate(
        (
            {"host": "another"},
            {"launcher": {**process_mark(os.getpid()), "start_ticks": 1}},
            {"launcher": None},
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert described(folder, **more).rings() == {0: folder / "rings" / "rank-00000.ring"}
