from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.core.errors import TraceError
from keepstep.traces import operation_tables
from keepstep.traces.operation_tables import is_parquet, read_operation_table

arrow = pytest.importorskip("pyarrow", reason="needs pyarrow (extra `traces`)")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (extra `traces`)")

ROW = {
    "rank": 0, "step": 16, "optype": "forward-compute", "start_ts": 1.0, "duration": 0.5, "seq_id": 0,
    "dp_rank": 0, "stage": 0,
}  # fmt: skip


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(arrow.Table.from_pylist(rows), path)
    return path


def test_rows_become_operations(tmp_path: Path) -> None:
    rows = [
        ROW,
        ROW | {"optype": "optimizer"},
        ROW | {"optype": "gc"},
        ROW | {"optype": "grads-reduce-scatter"},
    ]
    path = table(tmp_path / "t.parquet", rows)
    assert is_parquet(path)
    operations, missing = read_operation_table(path)
    assert [one.kind for one in operations] == ["forward", "local", "local", "grads-sync"]
    assert len({one.index for one in operations if one.kind == "local"}) == 2
    assert missing == ()


def test_bad_and_repeated_rows_are_counted(tmp_path: Path) -> None:
    rows = [
        ROW,
        ROW,
        ROW | {"step": 17, "duration": float("nan")},
        ROW | {"step": 18, "duration": -1.0},
        ROW | {"rank": None},
    ]
    operations, missing = read_operation_table(table(tmp_path / "t.parquet", rows))
    assert len(operations) == 1
    assert missing == (
        "t.parquet: 3 rows without a number or with an impossible time",
        "t.parquet: 1 rows that came twice",
    )


def test_other_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="lacks the columns"):
        read_operation_table(table(tmp_path / "t.parquet", [{"rank": 0, "step": 1}]))
    with pytest.raises(TraceError, match="no row"):
        read_operation_table(table(tmp_path / "u.parquet", [ROW | {"duration": -1.0}]))


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = table(tmp_path / "t.parquet", [ROW] * 1000)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(TraceError, match="cannot be read as Parquet") as refused:
        read_operation_table(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("rank", "0", "its column rank has type string; a number is needed there"),
        ("step", [1], "its column step has type list"),
        ("optype", 7, "its column optype has type int64; a string is needed there"),
        ("rank", 1 << 30, "no row of it can be used"),
        ("stage", -1, "no row of it can be used"),
        ("seq_id", float("nan"), "no row of it can be used"),
    ],
)
def test_columns_that_cannot_be_used_are_named(tmp_path: Path, column: str, value: object, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read_operation_table(table(tmp_path / "t.parquet", [ROW | {column: value}]))


def test_tables_too_large_are_refused_by_what_they_say_of_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = table(tmp_path / "t.parquet", [ROW | {"step": step} for step in range(100)])
    monkeypatch.setattr(operation_tables, "_MOST_BYTES", 100)
    with pytest.raises(TraceError, match="give fewer steps"):
        read_operation_table(path)
    monkeypatch.setattr(operation_tables, "MOST_ROWS", 99)
    with pytest.raises(TraceError, match="has 100 rows, 99 can be read"):
        read_operation_table(path)


def test_a_long_name_is_made_once_for_all_its_rows(tmp_path: Path) -> None:
    rows = [ROW | {"optype": "x" * 100_000, "step": step} for step in range(1_000)]
    operations, _ = read_operation_table(table(tmp_path / "t.parquet", rows))
    assert len(operations) == 1_000
