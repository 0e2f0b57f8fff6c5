"""What it costs a viewer to follow a run by its folder: CPU time and memory of one process, for several sizes.

    python -m benchmarks.operate.folder_cost [--ranks 8,1024,131072] [--seconds 40] [--out FILE]

The run is a stand-in (`fake_runs`), which another process makes and carries on: a step and a status each second, or
each five seconds in the largest, as the controller writes them. Seconds are CPU seconds, so that what else runs on the
machine changes them little.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_LARGE = 100_000
_LAYOUTS = {1024: "tp8-dp16-pp8", 131_072: "tp8-dp256-pp64"}


def measured(folder: Path, seconds: float) -> dict[str, Any]:
    """The figures of a process that follows the run in ``folder``."""
    from keepstep.view.run_source import open_source

    source = open_source(folder, from_folder=True)
    began_s = time.thread_time()
    snapshot = source.refresh()
    found: dict[str, Any] = {"first look, ms": _ms(began_s), "ranks": snapshot.world_size}
    while not source.is_whole:
        snapshot = source.refresh()
    found |= {"all read, s": round(time.thread_time() - began_s, 2), "troubles": list(snapshot.troubles)}
    for against in ("own", "peers"):
        for name in ("first", "again"):
            began_s = time.thread_time()
            source.samples.tile(against=against)
            found[f"picture against {against}, {name}, ms"] = _ms(began_s)
    version, sent, spent_s, longest_s = source.samples.version, 0, 0.0, 0.0
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        began_s = time.thread_time()
        source.refresh()
        news = source.samples.changed_since(version)
        sent += (source.samples.tile() if news is None else news).colours.size
        version = source.samples.version
        spent_s += time.thread_time() - began_s
        longest_s = max(longest_s, time.thread_time() - began_s)
        time.sleep(1.0)
    lasted_s = time.monotonic() - began
    return found | {
        "share of a core, %": round(100 * spent_s / lasted_s, 2),
        "longest look, ms": round(longest_s * 1e3, 1),
        "changes, bytes a second": round(sent / lasted_s),
        "most memory, MB": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6),
    }


def _ms(began_s: float) -> float:
    return round((time.thread_time() - began_s) * 1e3, 1)


def _figures(ranks: int, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="folder-cost-") as top:
        folder = Path(top, "run")
        steps, every = (24, 5.0) if ranks > _LARGE else (300, 1.0)
        maker = subprocess.Popen([
            sys.executable, "-m", "benchmarks.operate.fake_runs", str(folder), "--kind", "slow",
            "--ranks", str(ranks), "--steps", str(steps), "--layout", _LAYOUTS.get(ranks, ""),
            "--live", str(int(10 * seconds + 600)), "--every", str(every),
        ])  # fmt: skip
        try:
            while not (folder / "status.json").exists():
                if maker.poll() is not None:
                    raise RuntimeError(f"the run was not made: exit code {maker.returncode}")
                time.sleep(0.2)
            look = [sys.executable, "-m", "benchmarks.operate.folder_cost", "--of", str(folder)]
            done = subprocess.run(
                [*look, "--seconds", str(seconds)], check=True, capture_output=True, text=True
            )
        finally:
            maker.kill()
            maker.wait()
    return json.loads(done.stdout)


def main() -> None:
    """Print the figures, and write them with ``--out``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="8,1024,131072")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long a run that goes on is followed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.of is not None:
        print(json.dumps(measured(given.of, given.seconds)))
        return
    rows = [_figures(int(ranks), given.seconds) for ranks in given.ranks.split(",")]
    for row in rows:
        print(json.dumps(row))
    if given.out is not None:
        content = {"machine": f"{os.cpu_count()} cores", "runs": rows}
        given.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
