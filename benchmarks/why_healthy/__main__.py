"""Run healthy trainings of each framework, and count the failures that are named in them: none is right.

    python -m benchmarks.why_healthy [--frameworks ddp,fsdp2,…] [--seeds 0-9] [--out FILE]

A failure is named where an incident has deaths or a cause, or where ``keepstep why`` finds one in the ranks' logs or on
the console. ``make frameworks`` installs what is not in the usual environment.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._report import code_commit
from keepstep.report.incidents import read_incidents

FRAMEWORKS = ("ddp", "fsdp2", "deepspeed", "transformers", "lightning")
_JOB = Path(__file__).with_name("job.py")
_PATIENCE_S = 300.0


def one_run(framework: str, seed: int, place: Path) -> dict[str, Any]:
    """Run one job; returns its row."""
    run, console = place / "run", place / "console.log"
    ranks = 2 + 2 * (seed % 2)
    command = [
        sys.executable,
        "-m",
        "keepstep.cli",
        "run",
        "--nproc-per-node",
        str(ranks),
        "--run-dir",
        str(run),
    ]
    command += ["--keep-words", "all", str(_JOB), framework, str(seed)]
    environ = {**os.environ, "TMPDIR": str(place)}
    with open(console, "wb") as file:
        done = subprocess.run(
            command, stdout=file, stderr=file, timeout=_PATIENCE_S, env=environ, check=False
        )
    code = done.returncode
    incidents = read_incidents(run / "incidents")
    named = [one.summary for one in incidents if one.has_deaths or one.cause is not None]
    logs = [why(path) for path in (run / "logs", console)]
    failures = len(named) + sum(one["class"] != "none" for one in logs)
    told = [*named, *(one["root_line"] for one in logs if one["class"] != "none")]
    return {
        "framework": framework,
        "seed": seed,
        "ranks": ranks,
        "exit_code": code,
        "failures": failures,
        "told": told[:5],
        "right": code == 0 and failures == 0,
        "commit": code_commit(),
    }


def why(path: Path) -> dict[str, Any]:
    """What ``keepstep why`` says of logs."""
    command = [sys.executable, "-m", "keepstep.cli", "why", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (
        json.loads(done.stdout) if done.returncode in (0, 1) else {"class": "none", "root_line": done.stderr}
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frameworks", default=",".join(FRAMEWORKS))
    parser.add_argument("--seeds", default="0-9")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    first, _, last = given.seeds.partition("-")
    rows: list[dict[str, Any]] = []
    for framework in given.frameworks.split(","):
        for seed in range(int(first), int(last or first) + 1):
            place = Path(tempfile.mkdtemp(prefix="why-healthy-"))
            try:
                rows.append(one_run(framework, seed, place))
            finally:
                shutil.rmtree(place, ignore_errors=True)
            print(json.dumps(rows[-1]), flush=True)
            if given.out:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                with open(given.out, "a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
    wrong = sum(one["failures"] for one in rows)
    print(f"{len(rows)} healthy runs: {wrong} failures named, {sum(one['right'] for one in rows)} right")


if __name__ == "__main__":
    main()
