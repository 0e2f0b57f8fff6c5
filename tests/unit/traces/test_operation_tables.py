from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from keepstep.core.errors import TraceError
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
