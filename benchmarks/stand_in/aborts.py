"""Aborted collectives behind which an optimizer step stands: does any feed one, and are the ranks at one step after it?

    python -m benchmarks.stand_in.aborts [--seeds N] [--gate none] [--json FILE]

Each seed draws DDP or FSDP2, 2 or 4 ranks, and what ends a Session's step while the device still has gradients to
reduce: a rank is killed or raises an error, and the others go on in their processes; or ``keepstep ctl restart
--now`` at any moment, all healthy, all in fresh processes. The losses of each rank are compared with those of a
training that nothing happened to, bit by bit; and the steps with which the ranks begin again, with one another.
``--gate none`` is the same training without the gate, which keepstep takes for one with it. ``make cuda`` first. With
FILE, the trials are kept beside it (``FILE-trials.jsonl``).
"""

from __future__ import annotations

import random
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from benchmarks._report import Line, Report, bench_arguments
from benchmarks._trials import Trials
from benchmarks.stand_in.faults import Fault
from benchmarks.stand_in.launch import PYTHON, ROOT, Job, run, start

JOB = Path(__file__).with_name("jobs") / "session.py"
STEPS, WAITS_AT = 100, 8
PATIENCE_S = 240.0
_KERNELS = {"STAND_IN_KERNEL_US": "reduction=2000"}

Gate = Literal["kept", "none"]
Kind = Literal["die", "raise", "restart"]
KINDS: tuple[Kind, ...] = ("die", "raise", "restart")
Losses = list[dict[int, set[str]]]


def losses_of(folder: Path, ranks: int) -> Losses:
    """Of each rank the losses of each step that it noted."""
    found: Losses = []
    for rank in range(ranks):
        steps: dict[int, set[str]] = defaultdict(set)
        for line in (folder / f"losses-{rank}").read_text().splitlines():
            step, loss, _ = line.split()
            steps[int(step)].add(loss)
        found.append(dict(steps))
    return found


def begun_in(folder: Path, ranks: int) -> dict[int, set[int]]:
    """With which steps ranks began, by incarnation."""
    found: dict[int, set[int]] = defaultdict(set)
    for rank in range(ranks):
        for line in (folder / f"begun-{rank}").read_text().splitlines():
            incarnation, step, _ = line.split()
            found[int(incarnation)].add(int(step))
    return dict(found)


def processes_in(folder: Path, ranks: int) -> list[set[str]]:
    """The processes that were each rank."""
    texts = [(folder / f"begun-{rank}").read_text() for rank in range(ranks)]
    return [{line.split()[2] for line in text.splitlines()} for text in texts]


@cache
def undisturbed(layout: str, ranks: int) -> Losses:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = run(
            JOB, [str(STEPS), name], folder, ranks=ranks, values=True, settings={"LAYOUT": layout, **_KERNELS}
        )
        if done.exit_code != 0:
            raise RuntimeError(f"undisturbed: {done.console[-3000:]}")
        return losses_of(folder, ranks)


def trial(seed: int, gate: Gate, folder: Path) -> dict[str, Any]:
    """One job; what was drawn and what came of it."""
    draw = random.Random(seed)
    layout, ranks = draw.choice(("ddp", "fsdp2")), draw.choice((2, 2, 2, 4))
    kind = KINDS[seed % 3]
    rank, step = draw.randrange(ranks), draw.randrange(WAITS_AT + 2, STEPS // 2)
    where = draw.choice(("backward", "optimizer"))
    later_s = draw.uniform(0, 0.05)
    whole = undisturbed(layout, ranks)
    faults = [Fault(kind, rank=rank, step=step, where=where)] if kind != "restart" else []
    settings = {"LAYOUT": layout, "WAIT_AT": str(WAITS_AT), "KEEPSTEP_STANDBY_IDLE_S": "0.5", **_KERNELS}
    settings["GATE"] = gate
    with start(JOB, [str(STEPS), str(folder)], folder, ranks=ranks, values=True, faults=faults, settings=settings,
               flags=("--max-restarts", "2", "--in-place", "--verbose")) as job:  # fmt: skip
        if faults:
            _wait_for(job, lambda: job.console().count("standbys are warm") > 0)
        (folder / "go").touch()
        if not faults:
            noted = folder / "losses-0"
            _wait_for(job, lambda: noted.exists() and f"\n{step} " in noted.read_text())
            time.sleep(later_s)
            subprocess.run(
                [PYTHON, "-m", "keepstep.cli", "ctl", folder / "run", "restart", "--now"],
                cwd=ROOT, capture_output=True, check=False, timeout=PATIENCE_S,
            )  # fmt: skip
        done = job.finish(PATIENCE_S)
    found, begun = losses_of(folder, ranks), begun_in(folder, ranks)
    outcome: dict[str, Any] = {
        "exit_code": done.exit_code,
        "fed": differing(found, whole),
        "apart": sum(len(steps) > 1 for steps in begun.values()),
        "begun": [sorted(steps) for _, steps in sorted(begun.items())],
        "in_place": sum(len(processes) == 1 for processes in processes_in(folder, ranks)),
        "unnoted": sum(
            len(set(range(STEPS)) - set(one)) for one in found
        ),  # begun again behind a step not yet noted
    }
    right = outcome["exit_code"] == 0 and not outcome["fed"] and not outcome["apart"] and len(begun) > 1
    if faults and outcome["in_place"] != ranks - 1:
        right = False
    drawn = {"layout": layout, "ranks": ranks, "kind": kind, "rank": rank, "step": step, "where": where}
    return {**drawn, **outcome, "failed": "" if right else done.console[-3000:]}


def differing(found: Losses, whole: Losses) -> int:
    """How many steps' losses, over all ranks, are not those of the undisturbed training."""
    return sum(
        losses != before[step]
        for steps, before in zip(found, whole, strict=True)
        for step, losses in steps.items()
    )


def _wait_for(job: Job, has_come: Any) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not has_come():
        if job.is_over() or time.monotonic() > until_s:
            raise RuntimeError(job.console()[-3000:])
        time.sleep(0.005)


def judged(trials: Sequence[Mapping[str, Any]], gate: Gate) -> list[Line]:
    """The figures of these trials."""
    limit = "a stand-in for the GPU whose operators compute" + (
        "; without the gate" if gate == "none" else ""
    )
    lines: list[Line] = []
    told: Mapping[Kind, str] = {"die": "a rank killed", "raise": "a rank's error", "restart": "an order"}
    for kind, what in told.items():
        ours = [one for one in trials if one.get("kind") == kind]
        passed = sum(not one["failed"] for one in ours)
        lines.append(Line(f"went on as if nothing had been, {what}", f"{passed} of {len(ours)}", "", "all",
                          passed == len(ours), limit=limit))  # fmt: skip
    for what, name in (
        ("jobs with steps fed or mixed", "fed"),
        ("jobs whose ranks began a step apart", "apart"),
    ):
        count = sum(bool(one.get(name)) for one in trials)
        lines.append(Line(what, count, "", "0", count == 0, limit=limit))
    return lines


def main() -> None:
    parser = bench_arguments(
        "stand_in.aborts", "Aborted collectives before an optimizer step, on the stand-in GPU."
    )
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--gate", choices=("kept", "none"), default="kept")
    arguments = parser.parse_args()
    report = Report(f"aborts on the stand-in, gate {arguments.gate}", quick=arguments.quick)
    kept = Trials(arguments.json and arguments.json.with_name(f"{arguments.json.stem}-trials.jsonl"))
    trials: list[dict[str, Any]] = []
    for seed in range(3 if arguments.quick else arguments.seeds):
        with tempfile.TemporaryDirectory() as name:
            trials.append(
                kept.result(
                    f"aborts, gate {arguments.gate}",
                    seed,
                    lambda seed=seed, to=name: trial(seed, arguments.gate, Path(to)),
                )
            )
    for line in judged(trials, arguments.gate):
        report.add(line)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
