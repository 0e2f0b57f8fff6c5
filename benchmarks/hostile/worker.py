"""A process that plays many seeds of one reader: ``python -m benchmarks.hostile.worker READER FIRST LAST``.

Prints a line of JSON before each command and one after it: a process that ended in between was ended by its limits.
"""

from __future__ import annotations

import io
import json
import random
import resource
import sys
import tempfile
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from benchmarks.hostile.judging import Ended, faults, limit, unlimit
from benchmarks.hostile.siblings import READERS


def play(reader: str, seed: int) -> None:
    """Play one seed and print what was wrong."""
    from keepstep.cli import main as keepstep

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "given"
        folder.mkdir()
        unlimit()
        words = READERS[reader](random.Random(f"{reader} {seed}"), folder)
        said = {"reader": reader, "seed": seed, "words": words[:1] + words[2:]}
        print(json.dumps(said | {"begins": True}), flush=True)
        limit()
        _peak_bytes()
        held_bytes, began_s = _peak_bytes(), _cpu_s()
        out, err = io.StringIO(), io.StringIO()
        try:
            with redirect_stdout(out), redirect_stderr(err):
                code = keepstep(words)
        except BaseException:
            code = 1
            err.write(traceback.format_exc(limit=-3))
        ended = Ended(code, out.getvalue(), err.getvalue(), _cpu_s() - began_s, _peak_bytes() - held_bytes)
        told = {"code": code, "cpu_s": round(ended.cpu_s, 2), "peak_bytes": ended.peak_bytes}
        print(json.dumps(said | told | {"said": ended.err[-800:], "faults": faults(ended)}), flush=True)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak_bytes() -> int:
    """The most memory that the process had since it last asked."""
    text = Path("/proc/self/status").read_text()
    peak = next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM")), 0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak


if __name__ == "__main__":
    for number in range(int(sys.argv[2]), int(sys.argv[3])):
        play(sys.argv[1], number)
