"""Operation tables as straggler analysis uses them: Parquet with one row for each operation of each rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from keepstep.core.errors import TraceError
from keepstep.core.traced_operations import Operation, OperationKind

MOST_ROWS = 5_000_000
_COLUMNS = ("rank", "step", "optype", "start_ts", "duration", "seq_id", "dp_rank", "stage")
_KINDS: dict[str, OperationKind] = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "forward-send": "forward-send",
    "forward-recv": "forward-recv",
    "backward-send": "backward-send",
    "backward-recv": "backward-recv",
    "params-all-gather": "params-sync",
    "params-sync": "params-sync",
    "grads-reduce-scatter": "grads-sync",
    "grads-sync": "grads-sync",
    "embedding-grads-all-reduce": "embedding-sync",
    "optimizer-clip-main-grad": "norm-sync",
}


def is_parquet(path: Path) -> bool:
    """Whether a file begins as Parquet does."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False


def read_operation_table(path: Path) -> tuple[tuple[Operation, ...], tuple[str, ...]]:
    """The operations in a table, and what could not be used.

    Raises:
        TraceError: the file is no Parquet, columns are missing, or no row can be used.
    """
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]
    except ImportError as error:
        raise TraceError(
            f"{path}: Parquet is read by pyarrow, which is not installed: pip install 'keepstep[traces]'"
        ) from error
    try:
        file: Any = parquet.ParquetFile(path)
        names: list[str] = list(file.schema_arrow.names)
        absent = [name for name in _COLUMNS if name not in names]
        if absent:
            raise TraceError(f"{path}: is no operation table: it lacks the columns {', '.join(absent)}")
        if file.metadata.num_rows > MOST_ROWS:
            raise TraceError(
                f"{path}: has {file.metadata.num_rows} rows, more than the {MOST_ROWS} that are read"
            )
        columns: dict[str, list[Any]] = file.read(columns=list(_COLUMNS)).to_pydict()
    except TraceError:
        raise
    except Exception as error:  # pyarrow raises many kinds of errors for damaged files
        raise TraceError(f"{path}: cannot be read as Parquet: {str(error).splitlines()[0][:120]}") from error
    return _operations(columns, path)


def _operations(columns: dict[str, list[Any]], path: Path) -> tuple[tuple[Operation, ...], tuple[str, ...]]:
    found: dict[tuple[int, int, OperationKind, int], Operation] = {}
    locals_of: dict[tuple[str, int], int] = {}  # numbers of local operations by name and index
    bad = repeated = 0
    for rank, step, name, start, duration, index, replica, stage in zip(
        *(columns[column] for column in _COLUMNS), strict=True
    ):
        kind = _KINDS.get(str(name), "local")
        values = (rank, step, index, replica, stage, start, duration)
        if any(value is None for value in values) or not (math.isfinite(start) and 0 <= duration < math.inf):
            bad += 1
            continue
        number = int(index) if kind != "local" else locals_of.setdefault((str(name), index), len(locals_of))
        key = (int(rank), int(step), kind, number)
        if key in found:
            repeated += 1
            continue
        found[key] = Operation(
            int(rank), int(step), int(replica), int(stage), kind, number, float(start), float(duration)
        )
    missing: list[str] = []
    if bad:
        missing.append(f"{path.name}: {bad} rows without a number or with an impossible time")
    if repeated:
        missing.append(f"{path.name}: {repeated} rows that came twice")
    if not found:
        raise TraceError(f"{path}: no row of it can be used")
    return tuple(found.values()), tuple(missing)
