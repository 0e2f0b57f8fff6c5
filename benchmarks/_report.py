"""What every bench shares: its command line, its table and its JSON.

A bench collects :class:`Line` objects in a :class:`Report`; :meth:`Report.finish` prints the table and writes
``{"bench", "machine", "versions", "quick", "lines", "left_out"}``. Goals are copied from the issue as text, never
computed; ``met`` is decided by the bench. A bench exits 0 when it ran, whatever it found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Line:
    """One measured figure.

    ``goal`` is the issue's wording (None: informative only), ``met`` None when the bench does not judge it, ``peers``
    the same figure for other tools, ``limit`` what the figure does not show (emulated, synthetic, capped, few cores).
    """

    name: str
    value: float | int | str | None
    unit: str
    goal: str | None = None
    met: bool | None = None
    peers: Mapping[str, float | int | str] = field(default_factory=dict)
    limit: str | None = None


def bench_arguments(name: str, description: str) -> argparse.ArgumentParser:
    """The command line every bench has; add own flags to it before parsing."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument(
        "--quick", action="store_true", help="one repetition, capped peers; ends within 4 minutes on 2 cores"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON to FILE")
    samples = os.environ.get("KEEPSTEP_SAMPLES")
    parser.add_argument(
        "--samples",
        type=Path,
        metavar="DIR",
        default=Path(samples) if samples else None,
        help="folder of real samples (default: $KEEPSTEP_SAMPLES)",
    )
    return parser


def machine() -> dict[str, Any]:
    """CPU model, usable cores, memory (bytes), kernel and load average of this machine."""
    model = platform.processor() or platform.machine()
    memory_bytes = 0
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        pass
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory_bytes,
        "kernel": f"{platform.system()} {platform.release()}",
        "load_average": list(os.getloadavg()),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's version, the commit (``+``: the tree differs from it) and the installed versions of ``packages``."""
    found = {"python": platform.python_version(), "commit": _commit()}
    found.update((package, _version(package)) for package in packages)
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def code_commit() -> str:
    """The last commit that changed what is measured, or how: trials of it stay good when results are committed."""
    return _git("log", "-1", "--format=%h", "--", "src", "native", "benchmarks", ":!benchmarks/results")


def _commit() -> str:
    return _git("describe", "--always", "--dirty=+")


def _git(*arguments: str) -> str:
    root = Path(__file__).resolve().parent.parent
    try:
        said = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said.stdout.strip()


class Report:
    """Collects a bench's lines; print and write them with :meth:`finish`.

    From then on SIGTERM ends the bench by an exception, so that the job under way is cleared away.
    """

    def __init__(
        self, bench: str, *, quick: bool, packages: Iterable[str] = ("keepstep", "numpy", "torch")
    ) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        self.bench = bench
        self.quick = quick
        self.lines: list[Line] = []
        self.left_out: list[dict[str, str]] = []
        self._packages = tuple(packages)
        self._began = time.monotonic()

    def add(self, line: Line) -> None:
        self.lines.append(line)

    def leave_out(self, name: str, reason: str) -> None:
        """Name a line this run cannot judge, and why."""
        self.left_out.append({"name": name, "reason": reason})

    def as_dict(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "machine": machine(),
            "versions": versions(self._packages),
            "quick": self.quick,
            "wall_s": round(time.monotonic() - self._began, 1),
            "lines": [asdict(line) for line in self.lines],
            "left_out": self.left_out,
        }

    def finish(self, json_path: Path | None) -> None:
        """Print the table on stdout and, given a path, write the JSON there."""
        report = self.as_dict()
        where = report["machine"]
        print(f"{self.bench}: {where['cpu']}, {where['cores']} cores, commit {report['versions']['commit']}")
        # Piped output has no width of its own; a narrow table folds every word.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 200
        print("\n".join(table(_TITLES, [_cells(line) for line in self.lines], width)))
        for entry in self.left_out:
            print(f"left out: {entry['name']}: {entry['reason']}")
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
            print(f"written: {json_path}")


_TITLES = ("line", "value", "unit", "goal", "met", "peers", "limit")


def _cells(line: Line) -> tuple[str, ...]:
    met = {True: "yes", False: "NO", None: ""}[line.met]
    peers = "\n".join(f"{peer} {_shown(value)}" for peer, value in line.peers.items())
    return (line.name, _shown(line.value), line.unit, line.goal or "", met, peers, line.limit or "")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> list[str]:
    """The lines of a table of at most ``width`` characters: where it is wider, its widest columns fold."""
    cells = [titles, *rows]
    widths = [
        max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*cells, strict=True)
    ]
    least = max(map(len, titles))
    while sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > least:
        widths[widths.index(max(widths))] -= 1
    lines: list[str] = []
    for row in cells:
        folded = [_folded(cell, room) for cell, room in zip(row, widths, strict=True)]
        for at in range(max(map(len, folded))):
            parts = [cell[at] if at < len(cell) else "" for cell in folded]
            lines.append(
                "  ".join(f"{part:<{room}}" for part, room in zip(parts, widths, strict=True)).rstrip()
            )
    return [lines[0], "  ".join("-" * room for room in widths), *lines[1:]]


def _folded(cell: str, room: int) -> list[str]:
    return [part for line in cell.split("\n") for part in textwrap.wrap(line, room) or [""]]


def _shown(value: float | int | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
