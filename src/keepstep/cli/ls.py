"""``keepstep ls``: the runs of this machine and of a folder, those in trouble first."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from keepstep.cli._parsing import Parser, print_json
from keepstep.core.errors import RunError
from keepstep.core.log_lines import one_line
from keepstep.report.wording import seconds
from keepstep.view.incident_words import for_how_long
from keepstep.view.live_runs import live_folders
from keepstep.view.run_rows import RunRow, age_s, folders_in, rows_of
from keepstep.view.terminal_text import columns_of, fitted

_ABOUT = (
    "List runs: those that live on this machine, and those in FOLDER. Trouble comes first, then what lives, then "
    "what has ended, the newest first. Exit code 0, also where runs are in trouble."
)
_MOST_ENDED = 20  # runs that are over, unless all are wanted
_HEAD = ("RUN", "STATE", "STEP", "PACE", "LOST NOW", "AGE", "VERDICT")
_RIGHT = frozenset({2, 3, 4, 5})  # columns of figures
_WIDEST_NAME = 40  # columns
_TROUBLE, _LIVE = "31;1", "32"


def main(argv: Sequence[str]) -> int:
    """Print the list."""
    parser = Parser("ls", _ABOUT)
    text = "a folder with runs, or one run (default: ./runs, and what lives on this machine)"
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help=text)
    parser.add_json("print JSON, one run a line")
    text = f"also runs that ended before the newest {_MOST_ENDED} of them"
    parser.add_argument("--all", action="store_true", help=text)
    given = parser.parse(argv)
    now_s = time.time()
    rows = rows_of(_folders(given.folder), now_s)
    shown = rows if given.all else _newest(rows)
    if given.json:
        for row in shown:
            print_json(row)
        return 0
    for line in _lines(shown, now_s):
        print(line)
    if len(shown) < len(rows):
        print(f"{len(rows) - len(shown)} more have ended: --all lists them", file=sys.stderr)
    if not rows:
        where = (
            f"no runs in {given.folder}" if given.folder else "no runs in ./runs, none live on this machine"
        )
        print(one_line(where), file=sys.stderr)
    return 0


def _folders(given: Path | None) -> list[Path]:
    """The folders of all runs that are wanted, each once. Raises RunError for a folder that cannot be listed."""
    folder = given or Path("runs")
    found: dict[str, Path] = {}
    try:
        found = {os.path.realpath(path): path for path in folders_in(folder)}
    except OSError as error:
        if given is not None:
            raise RunError(
                f"{folder}: cannot be listed: {error.strerror}; name a folder with runs"
            ) from error
    if given is None:
        for path in live_folders():
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


def _newest(rows: Sequence[RunRow]) -> list[RunRow]:
    ended = [row for row in rows if not row.is_live and not row.is_trouble and row.state != "broken"]
    old = {row.path for row in ended[_MOST_ENDED:]}
    return [row for row in rows if row.path not in old]


def _lines(rows: Sequence[RunRow], now_s: float) -> Iterator[str]:
    """The table, cut to the terminal's width where there is one."""
    if not rows:
        return
    table = [_HEAD, *(_cells(row, now_s) for row in rows)]
    widths = [max(map(columns_of, column)) for column in zip(*table, strict=True)]
    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    columns = _columns()
    for place, cells in enumerate(table):
        line = "  ".join(
            fitted(cell, width, right=at in _RIGHT)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        line = fitted(line, columns).rstrip() if columns else line
        style = "" if not place else _style(rows[place - 1])
        yield f"\x1b[{style}m{line}\x1b[0m" if color and style else line


def _columns() -> int:
    """Columns of the terminal; 0 where there is none, and lines are as long as they are."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns
    except (OSError, ValueError):
        return 0


def _style(row: RunRow) -> str:
    return _TROUBLE if row.is_trouble else _LIVE if row.is_live else ""


def _cells(row: RunRow, now_s: float) -> tuple[str, ...]:
    name, age = one_line(row.name), age_s(row, now_s)
    return (
        fitted(name, min(columns_of(name), _WIDEST_NAME)),
        one_line(row.state),
        "" if row.step is None else f"{row.step}",
        "" if row.pace_s is None else seconds(row.pace_s),
        f"{row.lost:.0%}" if row.lost else "",
        "" if age is None else for_how_long(age),
        row.verdict,
    )
