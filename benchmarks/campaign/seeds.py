"""Where a campaign keeps its seeds: ``seeds.jsonl``, one JSON line a seed, sorted by case and seed.

Failed seeds are kept like passed ones. A seed that has a line is not run again; the line of a seed that was run once
more takes the place of the earlier one. The file is written whole or not at all, by one thread of one process at a
time: campaigns that run side by side may share it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._report import machine, versions

NAME = "seeds.jsonl"
Result = dict[str, Any]
_ROOT = Path(__file__).resolve().parents[2]


def kept(folder: Path, case: str) -> dict[int, Result]:
    """The results of a case, by seed and in that order."""
    return {seed: json.loads(line) for (of, seed), line in _lines(folder).items() if of == case}


def keep(folder: Path, result: Result) -> None:
    """Keep a result (with its "case" and "seed"), and where and by what it was made; without this machine's paths."""
    made = {
        "machine": machine(),
        "versions": versions(("keepstep", "torch", "numpy")),
        "ended_unix_s": round(time.time()),
    }
    _put(folder, [_line({**result, **made}).replace(f"{_ROOT}/", "")])


def convert(former: Path, folder: Path) -> int:
    """Put the results of a folder with one ``seed-NNN.json`` a seed, or one such folder a case, into ``folder``.

    Each file becomes a line with the same content; nothing is removed. Returns how many files there were.
    """
    found = sorted([*former.glob("seed-*.json"), *former.glob("*/seed-*.json")])
    _put(folder, [_line(json.loads(path.read_text())) for path in found])
    return len(found)


def _line(result: Result) -> str:
    return json.dumps(result, separators=(",", ":"), ensure_ascii=False)


def _lines(folder: Path) -> dict[tuple[str, int], str]:
    """The lines by case and seed."""
    path = folder / NAME
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as file:
        return dict(_keyed(line.rstrip("\n") for line in file))


def _keyed(lines: Iterable[str]) -> Iterator[tuple[tuple[str, int], str]]:
    for line in lines:
        result: Result = json.loads(line)
        yield (result["case"], result["seed"]), line


def _put(folder: Path, lines: Iterable[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        known = _lines(folder) | dict(_keyed(lines))
        partial = folder / f"{NAME}.partial"
        partial.write_text("".join(f"{known[key]}\n" for key in sorted(known)), encoding="utf-8")
        partial.replace(folder / NAME)


@contextmanager
def _alone_in(folder: Path) -> Generator[None]:
    """Hold the folder's lock, against other threads and other processes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
