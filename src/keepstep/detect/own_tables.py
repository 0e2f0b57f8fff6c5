"""A site's own tables of messages, as ``[why] tables`` of the configuration names them, beside keepstep's.

Their rows come first. In a run a table that is missing or wrong is left out and told in one line: it stops no training.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from keepstep.core.config import config_path, read_file
from keepstep.core.errors import UsageError
from keepstep.core.told import Row
from keepstep.detect.failure_rows import RowMatcher, rows_of_file, shipped_rows

MOST_TABLES = 64


def named_tables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The paths that the configuration names; those that are relative are so to its folder.

    Raises:
        UsageError: the configuration cannot be read, or names something else than paths.
    """
    path = config_path(environ)
    section: Any = read_file(path).get("why", {}) if path else {}
    tables: Any = cast("dict[str, Any]", section).get("tables", []) if isinstance(section, dict) else None
    if not isinstance(tables, list) or not all(isinstance(one, str) for one in cast("list[Any]", tables)):
        raise UsageError(f'{path}: write [why] and tables = ["FILE.toml", …]; paths of tables, nothing else')
    folder = path.parent if path else Path()
    found = tuple(str(folder / one) for one in cast("list[str]", tables))
    if len(found) > MOST_TABLES:
        raise UsageError(f"{path}: names {len(found)} tables; put their rows into {MOST_TABLES} or fewer")
    return found


def rows_of(environ: Mapping[str, str]) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """The rows of all tables that can be used, and a line about each of the others."""
    try:
        tables = named_tables(environ)
    except UsageError as error:
        return (), (f"{error}; keepstep's own tables are used",)
    read = [_rows_or_why_not(table) for table in tables]
    return tuple(row for rows, _ in read for row in rows), tuple(why for _, why in read if why)


def _rows_or_why_not(table: str) -> tuple[tuple[Row, ...], str]:
    try:
        return rows_of_file(table), ""
    except UsageError as error:
        return (), f"{error}; it is left out"


@functools.cache
def own_rows() -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """`rows_of` the environment of this process, read once."""
    return rows_of(os.environ)


@functools.cache
def own_matcher() -> RowMatcher:
    """The matcher for `own_rows` alone."""
    return RowMatcher(own_rows()[0])


@functools.cache
def matcher_in_force() -> RowMatcher:
    """The matcher for `own_rows` and keepstep's own."""
    return RowMatcher((*own_rows()[0], *shipped_rows()))
