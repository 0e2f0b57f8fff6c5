"""The table that a bench prints, and the JSON that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks._report import Line, Report, table


def test_a_table_folds_its_widest_column() -> None:
    rows = [("cost", "1.5", "of a step that does nothing else"), ("peers", "a 1\nb 2", "")]
    assert table(("line", "value", "limit"), rows, 80)[:3] == [
        "line   value  limit",
        "-----  -----  --------------------------------",
        "cost   1.5    of a step that does nothing else",
    ]
    assert table(("line", "value", "limit"), rows, 30) == [
        "line   value  limit",
        "-----  -----  ----------------",
        "cost   1.5    of a step that",
        "              does nothing",
        "              else",
        "peers  a 1",
        "       b 2",
    ]


def test_a_table_is_no_narrower_than_its_titles() -> None:
    assert table(("line", "value"), [("a" * 9, "b")], 1) == [
        "line   value",
        "-----  -----",
        "aaaaa  b",
        "aaaa",
    ]


def test_a_report_prints_its_lines_and_writes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("probe", quick=True, packages=())
    report.add(Line("cost [of a step]", 0.12345, "%", "at most 1", True, {"other": 3}))
    report.add(Line("not measured", None, "s"))
    report.leave_out("on a GPU", "there is none")
    report.finish(tmp_path / "made" / "probe.json")
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("probe: ")
    assert told[1].split() == ["line", "value", "unit", "goal", "met", "peers", "limit"]
    words = [word.strip() for word in told[3].split("  ") if word.strip()]
    assert words == ["cost [of a step]", "0.1235", "%", "at most 1", "yes", "other 3"]
    assert told[4].split()[:4] == ["not", "measured", "-", "s"]
    assert told[5] == "left out: on a GPU: there is none"
    written = json.loads((tmp_path / "made" / "probe.json").read_text())
    assert [line["value"] for line in written["lines"]] == [0.12345, None]
