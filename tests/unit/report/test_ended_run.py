"""What the files of an ended run tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.core.exit_codes import CLASSES
from keepstep.report.ended_run import read_end


@pytest.mark.parametrize(
    ("kind", "by_scheduler"),
    [
        ("time-limit", True),
        ("preempted", True),
        ("node-lost", False),
        ("hardware", False),
    ],
)
def test_only_time_limit_and_preemption_are_the_schedulers(
    tmp_path: Path, kind: str, by_scheduler: bool
) -> None:
    cause = {"class": {**CLASSES}[kind], "kind": kind}
    (tmp_path / "end.json").write_text(json.dumps({"exit_code": 75, "reason": "it ended", "cause": cause}))
    assert (read_end(tmp_path) is not None) == by_scheduler


@pytest.mark.parametrize("text", ["", "[]", '{"exit_code": 0, "reason": "finished"}', "\x00"])
def test_any_other_end_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "end.json").write_text(text)
    assert read_end(tmp_path) is None
    assert read_end(tmp_path / "gone") is None
