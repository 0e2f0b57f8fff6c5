"""Operation tables as straggler analysis uses them: Parquet with one row for each operation of each rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from keepstep.core.errors import TraceError
from keepstep.core.regular_files import open_regular
from keepstep.core.traced_operations import Operation, OperationKind
from keepstep.traces.dump_files import MOST_RANKS

MOST_ROWS = 1_000_000
_MOST_BYTES = 256 << 20  # of a table as it says of itself, unpacked
_BATCH_ROWS = 1 << 16
_MOST_NUMBER = 1 << 53
_MOST_LETTERS = 100  # of an operation's name
_COLUMNS = ("rank", "step", "optype", "start_ts", "duration", "seq_id", "dp_rank", "stage")
_NAME = "optype"
_NUMBERS = re.compile(r"u?int(8|16|32|64)|halffloat|float|double")
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
        with open_regular(path) as file:
            return file.read(4) == b"PAR1"
    except OSError:
        return False


def read_operation_table(path: Path) -> tuple[tuple[Operation, ...], tuple[str, ...]]:
    """The operations in a table, and what could not be used.

    Raises:
        TraceError: the file is no Parquet, is too large, columns are missing or of another type, or no row can be used.
    """
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]
    except ImportError as error:
        raise TraceError(
            f"{path}: Parquet is read by pyarrow, which is not installed: pip install 'keepstep[traces]'"
        ) from error
    try:
        _check(parquet.ParquetFile(path), path)
        return _operations(_rows(parquet.ParquetFile(path, read_dictionary=[_NAME])), path)
    except TraceError:
        raise
    except Exception as error:  # pyarrow raises many kinds of errors for damaged files
        said = " ".join(str(error).split())[:120] or type(error).__name__
        raise TraceError(f"{path}: cannot be read as Parquet: {said}") from error


def _check(file: Any, path: Path) -> None:
    """Raise TraceError for a table that lacks columns, or is too large."""
    types: dict[str, str] = {field.name: str(field.type) for field in file.schema_arrow}
    absent = [name for name in _COLUMNS if name not in types]
    if absent:
        raise TraceError(f"{path}: is no operation table: it lacks the columns {', '.join(absent)}")
    for name in _COLUMNS:
        wanted = "string" if name == _NAME else "number"
        if not ("string" in types[name] if name == _NAME else _NUMBERS.fullmatch(types[name])):
            raise TraceError(
                f"{path}: its column {name} has type {types[name][:40]}; a {wanted} is needed there"
            )
    rows: int = file.metadata.num_rows
    if rows > MOST_ROWS:
        raise TraceError(f"{path}: has {rows} rows, {MOST_ROWS} can be read; give a table of fewer steps")
    size = sum(file.metadata.row_group(at).total_byte_size for at in range(file.metadata.num_row_groups))
    if size > _MOST_BYTES:
        raise TraceError(
            f"{path}: has {size >> 20} MiB when unpacked, {_MOST_BYTES >> 20} can be read; give fewer steps"
        )


def _rows(file: Any) -> Iterator[tuple[Any, ...]]:
    """The rows of a table, in the order of ``_COLUMNS``."""
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=list(_COLUMNS)):
        columns: list[list[Any]] = []
        for name in _COLUMNS:
            column = batch.column(batch.schema.get_field_index(name))
            if name == _NAME:  # each name is made once, however often it comes
                names = [str(one)[:_MOST_LETTERS] for one in column.dictionary.to_pylist()]
                columns.append([None if at is None else names[at] for at in column.indices.to_pylist()])
            else:
                columns.append(column.to_pylist())
        yield from zip(*columns, strict=True)


def _is_possible(name: Any, whole: Sequence[Any], start: Any, duration: Any) -> bool:
    """Whether the values of a row can be those of an operation. ``whole``: rank, step, index, replica, stage."""
    if name is None or any(value is None for value in (*whole, start, duration)):
        return False
    if not math.isfinite(start) or not 0 <= duration < math.inf:
        return False
    if not all(-1 <= value < _MOST_NUMBER for value in whole):
        return False
    rank, _, _, replica, stage = whole
    return 0 <= rank < MOST_RANKS and 0 <= replica < MOST_RANKS and 0 <= stage < MOST_RANKS


def _operations(rows: Iterable[tuple[Any, ...]], path: Path) -> tuple[tuple[Operation, ...], tuple[str, ...]]:
    found: dict[tuple[int, int, OperationKind, int], Operation] = {}
    locals_of: dict[tuple[str, int], int] = {}  # numbers of local operations by name and index
    bad = repeated = 0
    for rank, step, name, start, duration, index, replica, stage in rows:
        if not _is_possible(name, (rank, step, index, replica, stage), start, duration):
            bad += 1
            continue
        kind = _KINDS.get(name, "local")
        number = int(index) if kind != "local" else locals_of.setdefault((name, int(index)), len(locals_of))
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
