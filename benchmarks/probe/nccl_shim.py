"""What the NCCL shim adds to a call, and what a record costs without Python.

Compiled here; no NCCL and no GPU: the calls are those of a stand-in on host memory, a group of one rank, whose cheapest
call is an all-reduce of four bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._report import Line, Report

SHIM_GOAL = "≤ 150 ns a call, median"
RECORD_GOAL = "≤ 40 ns a record"
LOST_GOAL = "0 lost at 1 M calls/s"
CALLS_A_SECOND = 1_000_000
SHIM_BUDGET_NS, RECORD_BUDGET_NS = 150.0, 40.0
STAND_IN = "calls of a stand-in for NCCL on host memory, not of NCCL"
NATIVE = Path(__file__).parents[2] / "native"


def shim_lines(report: Report, pairs: int, calls: int, seconds: int) -> None:
    """``pairs``: of processes, one with the shim and one without; ``calls`` timed one by one in each.

    ``seconds``: for which an agent reads a million calls a second.
    """
    from keepstep.launch.workers.rings import preload, shim
    from keepstep.ring import create

    compiler, library = shutil.which(os.environ.get("CXX", "g++")), shim()
    if compiler is None or library is None:
        report.leave_out("NCCL shim", "no C++ compiler (set CXX)" if library else "the shim is not installed")
        return
    with tempfile.TemporaryDirectory() as folder:
        program, record = _compile(compiler, Path(folder))
        ring = create(65536)
        watched = {"KEEPSTEP_RING": f"/proc/{os.getpid()}/fd/{ring}", "RANK": "0", "WORLD_SIZE": "1"}
        plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        both = plain, {**plain, **watched, **preload(plain, library)}
        found = [[_median_ns(program, calls, environ) for environ in both] for _ in range(pairs)]
        os.close(ring)
        report.add(_lost_line(program, Path(folder), CALLS_A_SECOND * seconds))
        said = subprocess.run([record], capture_output=True, text=True, check=True).stdout
    without, added = (
        statistics.median(values) for values in zip(*((a, b - a) for a, b in found), strict=True)
    )
    peers: dict[str, float | int | str] = {"without the shim": without}
    report.add(
        Line(
            "NCCL shim, added to a call",
            added,
            "ns",
            SHIM_GOAL,
            added <= SHIM_BUDGET_NS,
            peers=peers,
            limit=STAND_IN,
        )
    )
    match = re.search(r"start \+ end +([\d.]+) ns +\(less its two clock reads: ([\d.]+) ns\)", said)
    assert match is not None, said
    whole, own = float(match[1]), float(match[2])
    parts: dict[str, float | int | str] = {"less its two clock reads": own}
    met = whole <= RECORD_BUDGET_NS
    report.add(
        Line(
            "ring record, native, start and end",
            whole,
            "ns",
            RECORD_GOAL,
            met,
            parts,
            "of this machine's clock",
        )
    )


def _lost_line(program: Path, folder: Path, calls: int) -> Line:
    """A worker of `keepstep run` that does nothing but call, and its agent."""
    argv = [
        sys.executable,
        "-m",
        "keepstep.cli",
        "run",
        "--nproc-per-node",
        "1",
        "--run-dir",
        f"{folder}/run",
    ]
    argv += ["--no-python", str(program), str(calls), "pace", str(CALLS_A_SECOND)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    (node,) = json.loads((folder / "run" / "status.json").read_text())["nodes"]
    parts: dict[str, float | int | str] = {"of": calls, "calls a second": round(float(done.stdout))}
    lost: int = node["dropped"]
    return Line("records of calls lost, agent reading", lost, "", LOST_GOAL, lost == 0, parts, STAND_IN)


def _compile(compiler: str, folder: Path) -> tuple[Path, Path]:
    def compiled(source: str, name: str, *flags: str) -> Path:
        argv = [
            compiler,
            "-std=c++17",
            "-O2",
            str(NATIVE / "tests" / source),
            "-o",
            str(folder / name),
            *flags,
        ]
        subprocess.run(argv, check=True)
        return folder / name

    stand_in = compiled("stand_in_nccl.cpp", "libnccl.so.2", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2")
    linked = (str(stand_in), f"-Wl,-rpath,{folder}", "-pthread")
    return compiled("nccl_program.cpp", "program", *linked), compiled("bench.cpp", "bench", "-pthread")


def _median_ns(program: Path, calls: int, environ: dict[str, str]) -> float:
    done = subprocess.run(
        [program, str(calls), "bench"], env=environ, capture_output=True, text=True, check=True
    )
    return float(done.stdout)
