"""CUDA snapshots on the stand-in GPU, whose operators compute: are they whole, and whom do they hold up?

    python -m benchmarks.stand_in.snapshots [--seeds N] [--part states|waits|kills] [--json FILE]

- states: a drawn state (types, shapes, strides, shared memory; plain, DDP or FSDP2 with an optimizer) of two ranks is
  saved while the kernels that make it are still to run, and restored byte by byte after training has gone on.
- waits: what a snapshot adds to the waits on the training's streams, and of the host for them.
- kills: a rank is killed (SIGKILL) at a random moment of a save, the other soon after; what is restored has the
  bytes of a training that goes to the same step.

``make cuda`` first. With FILE, a line for each seed is kept beside it (``FILE-trials.jsonl``), failed ones too.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks._report import Line, Report, bench_arguments
from benchmarks._trials import Trials
from benchmarks.stand_in.launch import PYTHON, environment

JOB = Path(__file__).with_name("jobs") / "snapshots.py"
PARTS = ("states", "waits", "kills")
_SEED_S = 150


def trials(part: str, seeds: range, folder: Path) -> Iterator[dict[str, Any]]:
    """The job's line for each seed, in their order; raises RuntimeError where it ends early."""
    words = [PYTHON, JOB, part, str(seeds.start), str(seeds.stop - 1)]
    console = folder / "console"
    with open(console, "wb") as errors:
        job = subprocess.Popen(
            words, env=environment(folder, values=True), stdout=subprocess.PIPE, stderr=errors
        )
    with job:
        assert job.stdout is not None
        for line in job.stdout:
            yield json.loads(line)
    if job.returncode:
        raise RuntimeError(console.read_text(errors="replace")[-3000:])


def measured(part: str, count: int, folder: Path) -> Callable[[int], dict[str, Any]]:
    """A function that gives the line of a seed; seeds are asked for in their order, some of them not at all."""
    told: list[Iterator[dict[str, Any]]] = []

    def line(seed: int) -> dict[str, Any]:
        if not told:
            told.append(trials(part, range(seed, count), folder))
        return next(one for one in told[0] if one["seed"] == seed)

    return line


def judged(part: str, found: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The figures of these trials."""
    right = sum(bool(one.get("right")) and not one["failed"] for one in found)
    limit = "a stand-in for the GPU, whose memory is the host's"
    what = {
        "states": "restored byte by byte",
        "waits": "no wait added to the training's streams",
        "kills": "killed in a save, restored whole",
    }[part]
    return [Line(what, f"{right} of {len(found)}", "", "all", right == len(found), limit=limit)]


def main() -> None:
    parser = bench_arguments("stand_in.snapshots", "CUDA snapshots on the stand-in GPU.")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--part", choices=PARTS)
    arguments = parser.parse_args()
    report = Report("snapshots on the stand-in", quick=arguments.quick)
    kept = Trials(arguments.json and arguments.json.with_name(f"{arguments.json.stem}-trials.jsonl"))
    for part in [arguments.part] if arguments.part else PARTS:
        count = 3 if arguments.quick else min(arguments.seeds, 6) if part == "waits" else arguments.seeds
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            line = measured(part, count, Path(folder))
            found = [kept.result(part, seed, partial(line, seed)) for seed in range(count)]
        for line in judged(part, found):
            report.add(line)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
