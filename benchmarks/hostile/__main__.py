"""Files made to harm whoever reads them: each is read, or refused in one line, within 10 s and 1 GB.

    python -m benchmarks.hostile [--seeds 200] [--readers recorder-pickle,run] [--json benchmarks/results/hostile.json]

The files that were found by hand are given to the real command, in a process of its own. Their siblings, drawn by
seed, are given to the command's function, many in a process; the limits are the same. Time is the processor's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks.hostile.judging import MOST_BYTES, MOST_S, ROOT, SINGLE, Ended, faults, run
from benchmarks.hostile.named import CASES, Case
from benchmarks.hostile.siblings import READERS

GOAL = "each within 10 s, 1 GB, exit code 2 and one line"
BLOCK_S = 1800

Seen = dict[str, Any]


def judged(case: Case) -> tuple[Ended, list[str]]:
    """How the command ended, and what was wrong with that."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "given"
        folder.mkdir()
        ended = run(case.make(folder), case.environment)
    found = faults(ended, case.codes)
    said = ended.out + ended.err
    if case.says and case.says not in said:
        found.append(f"does not say {case.says!r}")
    if case.silent_on and case.silent_on in said:
        found.append(f"says {case.silent_on!r}")
    return ended, found


def played(reader: str, seeds: int) -> Iterator[Seen]:
    """What each seed came to. A worker that is ended by its limits is followed by one that goes on after that seed."""
    first = 0
    while first < seeds:
        command = [sys.executable, "-m", "benchmarks.hostile.worker", reader, str(first), str(seeds)]
        try:
            worker = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, **SINGLE},
                capture_output=True,
                text=True,
                timeout=BLOCK_S,
            )
            output, ended = worker.stdout, f"ended with {worker.returncode}: {worker.stderr[-300:]}"
        except subprocess.TimeoutExpired as late:
            output, ended = (late.stdout or b"").decode(), f"did not end within {BLOCK_S} s"
        rows: list[Seen] = [json.loads(line) for line in output.splitlines()]
        begun = {row["seed"]: row for row in rows if "begins" in row}
        done = {row["seed"]: row for row in rows if "begins" not in row}
        yield from done.values()
        lost = [seed for seed in begun if seed not in done]
        if not lost and len(done) < seeds - first:
            lost = [first + len(done)]
        for seed in lost:
            yield {"reader": reader, "seed": seed, "cpu_s": float(MOST_S), "peak_bytes": 0, "faults": [ended]}
        first = max([*done, *lost]) + 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = bench_arguments("hostile", __doc__ or "")
    parser.add_argument("--seeds", type=int, default=200, help="siblings of each reader (200)")
    parser.add_argument("--readers", default=",".join(READERS), help="only these, or none ('')")
    parser.add_argument(
        "--cases", metavar="WORD", help="of the named files only those with this in their name"
    )
    given = parser.parse_args(argv)
    report = Report("hostile", quick=given.quick, packages=("keepstep", "numpy", "pyarrow"))
    limits = f"{MOST_S} s of processor time, {MOST_BYTES >> 30} GiB"
    chosen = [case for case in CASES if given.cases is None or (given.cases and given.cases in case.name)]
    right = 0
    for case in chosen:
        ended, wrong = judged(case)
        right += not wrong
        last = (ended.err or ended.out).strip().split("\n")[-1][:160]
        print(
            f"{'NO' if wrong else '  '} {case.name}: {ended.code}, {ended.cpu_s:.1f} s, "
            f"{ended.peak_bytes >> 20} MiB; {last}"
        )
        told = (
            "; ".join(wrong) or f"exit code {ended.code}, {ended.cpu_s:.1f} s, {ended.peak_bytes >> 20} MiB"
        )
        report.add(Line(f"  {case.name}", "wrong" if wrong else "right", "", limit=told))
    if chosen:
        report.lines.insert(
            0,
            Line("named files", f"{right}/{len(chosen)}", "files", GOAL, right == len(chosen), limit=limits),
        )
    seeds = min(given.seeds, 20) if given.quick else given.seeds
    for reader in filter(None, given.readers.split(",")):
        rows = list(played(reader, seeds))
        bad = [row for row in rows if row["faults"]]
        for row in bad[:20]:
            print(
                f"NO {reader} seed {row['seed']} {row.get('words')}: {'; '.join(row['faults'])} {row.get('said', '')}"
            )
        slowest, largest = max(row["cpu_s"] for row in rows), max(row["peak_bytes"] for row in rows)
        told = f"at most {slowest:.1f} s, {largest >> 20} MiB"
        if bad:
            told += f"; seeds {', '.join(str(row['seed']) for row in bad[:10])}"
        value = f"{len(rows) - len(bad)}/{len(rows)}"
        report.add(
            Line(f"siblings: {reader}", value, "files", GOAL, not bad and len(rows) >= seeds, limit=told)
        )
    report.finish(given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
