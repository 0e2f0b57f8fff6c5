"""The Gantt of a culprit's pipeline, from rings as a run saves them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.view.web.served_run import SLOW

from keepstep.core.layout import ParallelLayout
from keepstep.core.summary import IterationSummary
from keepstep.traces.chrome import Span
from keepstep.view.web.pipeline_bars import Bar, bars_in, pipeline_content, two_steps


def span(track: str, name: str, start_s: float, end_s: float, **args: object) -> Span:
    return Span(track, name, start_s * 1e6, end_s * 1e6, args)


def test_blocks_are_cut_at_the_ends_of_the_step_and_waits_lie_above() -> None:
    spans = [
        span("phases", "backward", 11.0, 14.0),
        span("group pp", "ALLREDUCE", 12.5, 13.0),
        span("phases", "forward", 9.0, 11.0),
        span("communicators", "INIT", 10.0, 12.0),
        span("phases", "optimizer", 15.0, 16.0),
    ]
    assert bars_in(spans, 10.0, 13.0) == [
        Bar("forward", 0.0, 1.0, "forward"),
        Bar("backward", 1.0, 3.0, "backward"),
        Bar("wait", 2.5, 3.0, "ALLREDUCE"),
    ]


def test_of_many_blocks_the_largest_are_kept() -> None:
    spans = [span("phases", "forward", at, at + 0.1 + at / 1e4) for at in range(1000)]
    bars = bars_in(spans, 0.0, 2000.0)
    assert len(bars) == 160
    assert min(bar.start_s for bar in bars) == 840


def test_of_a_step_that_does_not_end_is_drawn_what_stands_in_it() -> None:
    rows = [
        IterationSummary(rank, step, float(step), 1.0, 1.0, 0.0) for rank in (0, 1) for step in range(8, 12)
    ]
    hang = replace(SLOW, kind="hang", onset_step=12, culprits=(replace(SLOW.culprits[0], rank=1),))
    seen = {  # the rings were read at 60 s
        0: [
            span("phases", "backward", 8.0, 11.5),
            span("phases", "backward", 12.0, 14.0),
            span("point-to-point", "RECV from 1", 14.0, 60.0, in_flight=True),
        ],
        1: [span("phases", "optimizer", 8.0, 12.0), span("phases", "backward", 12.5, 60.0, in_flight=True)],
    }
    before, now = two_steps(rows, hang, seen)["steps"]
    assert (before["when"], before["step"], before["seconds"]) == ("before", 11, 1.0)
    assert (now["when"], now["step"], now["seconds"]) == ("stuck", 12, 2.3)
    assert now["ranks"] == [
        {"rank": 0, "bars": [["backward", 0.0, 2.0, "backward"], ["wait", 2.0, 2.3, "RECV from 1"]]},
        {"rank": 1, "bars": [["backward", 0.5, 2.3, "backward"]]},
    ]
    assert [one["when"] for one in two_steps(rows, replace(hang, kind="crash"), seen)["steps"]] == ["before"]


def test_it_is_said_why_there_is_nothing_to_draw(tmp_path: Path) -> None:
    def reason(path: Path | None, incident=SLOW) -> str:
        return pipeline_content(path, incident, ParallelLayout(pp=2, dp=4))["reason"]

    assert "folder is not here" in reason(None)
    assert "no onset step" in reason(tmp_path, replace(SLOW, onset_step=None))
    assert "no run folder" in reason(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"host": os.uname().nodename}))
    assert "no rings saved" in reason(tmp_path)
    (tmp_path / "rings").mkdir()
    (tmp_path / "rings" / "rank-00005.ring").write_bytes(b"no ring")
    assert "cannot be read" in reason(tmp_path)


@pytest.mark.parametrize("name", ["../../etc", "\n<script>"])
def test_a_reason_is_one_line(tmp_path: Path, name: str) -> None:
    assert "\n" not in pipeline_content(tmp_path / name, SLOW, None)["reason"]
