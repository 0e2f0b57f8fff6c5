"""Recoveries of four ranks on the stand-in GPU, whose operators compute: killed, an exception, an error of a kernel.

    python -m benchmarks.stand_in.recoveries [--times N] [--first SEED] [--way standbys|in-place] [--json FILE]

Each time is one job of a Session for each way, by warm standbys alone and in place beside them. Its faults come one
after the other, each of another kind and of a drawn rank and phase, once standbys are warm. Told are the seconds from
the fault until all ranks have made a step that none had made before, as far as any had noted; and what keepstep notes
of it. Losses are compared with those of a training that nothing happened to, bit by bit. ``make cuda`` first. With
FILE, a line for each job is kept beside it (``FILE-trials.jsonl``).
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._report import Line, Report, bench_arguments
from benchmarks._trials import Trials
from benchmarks.gpu.judge import until_new_step, until_next_step
from benchmarks.gpu.recovery import (
    FAULTS,
    FLAGS,
    SESSION,
    WARM,
    give_order,
    recovered,
    told_steps,
    trained,
    truths,
    whole_lines,
)
from benchmarks.stand_in.aborts import Losses, differing, losses_of
from benchmarks.stand_in.launch import Job, run, start

RANKS = 4
LAYOUTS = ("ddp", "fsdp2")
_PAUSE_S = 0.05  # of each step, for two cores to come along
_PATIENCE_S = 240.0
_LOOKS_EVERY_S = 0.2  # ranks note the times themselves, and two cores are theirs
_STEPS = 1_000_000
_AFTER_S = 1.0  # that a job trains on behind its last fault


class Way(NamedTuple):
    """How a job goes on: with which flags, within how many seconds, and how many ranks are to be what."""

    flags: tuple[str, ...]
    goal_s: float
    standbys: int
    survived: int


WAYS = {
    "standbys": Way((), 1.5, RANKS, 0),
    "in-place": Way(("--in-place",), 0.5, 1, RANKS - 1),
}


class Plain:
    """The losses of undisturbed trainings by layout, of as many steps as were asked for."""

    def __init__(self) -> None:
        self._known: dict[str, Losses] = {}

    def losses(self, layout: str, steps: int) -> Losses:
        """Those of ``steps`` steps at least. Raises RuntimeError where the training does not come to its end."""
        found = self._known.get(layout)
        if found is None or len(found[0]) < steps:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
                done = run(
                    SESSION,
                    [str(steps), name],
                    Path(name),
                    ranks=RANKS,
                    values=True,
                    settings={"LAYOUT": layout},
                    timeout_s=4 * _PATIENCE_S,
                )
                if done.exit_code != 0:
                    raise RuntimeError(f"undisturbed: {done.console[-3000:]}")
                found = self._known[layout] = losses_of(Path(name), RANKS)
        return found


def trial(way: Way, seed: int, plain: Plain, folder: Path) -> dict[str, Any]:
    """One job with its faults; what was drawn and what came of it."""
    draw = random.Random(f"recoveries {seed}")
    layout, kinds = LAYOUTS[seed % len(LAYOUTS)], draw.sample(list(FAULTS), len(FAULTS))
    faults: list[dict[str, Any]] = [
        {"what": what, "rank": draw.randrange(RANKS), "where": draw.choice(("backward", "optimizer"))}
        for what in kinds
    ]
    settings = {"LAYOUT": layout, "PAUSE_S": str(_PAUSE_S), "STAND_IN_NOTES": str(folder),
                "KEEPSTEP_STANDBY_IDLE_S": "0.5"}  # fmt: skip
    began_s = time.monotonic()
    with start(SESSION, [str(_STEPS), str(folder)], folder, ranks=RANKS, values=True, settings=settings,
               flags=(*FLAGS, *way.flags)) as job:  # fmt: skip
        warm = 0
        for fault in faults:
            warm = _awaited(job, "warm standbys", lambda seen=warm: _more(job.console().count(WARM), seen))
            fault |= struck(job, fault)
        time.sleep(_AFTER_S)
    found = losses_of(folder, RANKS)
    wrong = differing(found, plain.losses(layout, 1 + max(max(steps) for steps in found)))
    recoveries = recovered(folder)
    taken = [(one["standbys"], one["survived"]) for one in recoveries]
    outcome = {
        "steps": 1 + min(max(steps) for steps in found),
        "differing": wrong,
        "taken": taken,
        "phases": [one["phases"] for one in recoveries],
        "wall_s": round(time.monotonic() - began_s, 1),
    }
    right = not wrong and taken == [(way.standbys, way.survived)] * len(faults)
    return {"layout": layout, "faults": faults, **outcome, "failed": "" if right else job.console()[-3000:]}


def struck(job: Job, fault: Mapping[str, Any]) -> dict[str, float]:
    """Have a rank fail, and wait until all have made a new step; the seconds until then, and until any step of all."""
    folder, rank = job.folder, fault["rank"]
    before = len(truths(folder, rank))
    give_order(folder / f"order-{rank}", f"{fault['what']} {fault['where']}")
    _awaited(job, "the fault", lambda: len(truths(folder, rank)) > before)
    struck_s = truths(folder, rank)[-1]["unix_s"]
    seconds = _awaited(
        job,
        "a step after the fault",
        lambda: until_new_step(struck_s, [told_steps(folder, one) for one in range(RANKS)], noted(folder)),
    )
    first = until_next_step(struck_s, [trained(folder, one)[0] for one in range(RANKS)]) or seconds
    return {"seconds": round(seconds, 3), "first_step_s": round(first, 3)}


def noted(folder: Path) -> list[tuple[float, int]]:
    """When each step's loss was noted, by whichever rank; Unix seconds."""
    lines = [line.split() for rank in range(RANKS) for line in whole_lines(folder / f"losses-{rank}")]
    return [(float(at_s), int(step)) for step, _, at_s, *_ in lines]


def _more(count: int, than: int) -> int:
    return count if count > than else 0


def _awaited(job: Job, what: str, condition: Callable[[], Any]) -> Any:
    until_s = time.monotonic() + _PATIENCE_S
    while not (found := condition()):
        if job.is_over() or time.monotonic() > until_s:
            raise RuntimeError(f"{what} did not come: {job.console()[-3000:]}")
        time.sleep(_LOOKS_EVERY_S)
    return found


def judged(name: str, trials: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The figures of a way."""
    goal_s = WAYS[name].goal_s
    limit = (
        f"a stand-in for the GPU; {RANKS} ranks, steps of {1000 * _PAUSE_S:.0f} ms and more; with a Session"
    )
    lines: list[Line] = []
    for what, called in FAULTS.items():
        took = [told["seconds"] for told in _faults(trials, what)]
        first = [told["first_step_s"] for told in _faults(trials, what)]
        within = sum(seconds <= goal_s for seconds in took)
        peers: dict[str, float] = {}
        if took:
            peers = {"median (s)": round(statistics.median(took), 3), "longest (s)": max(took)}
            peers["to a step of all, longest (s)"] = max(first)
        value, met = f"{within} of {len(trials)}", within == len(trials)
        goal = f"all within {goal_s} s"
        lines.append(
            Line(f"{name}: {called} to the next new step of all", value, "", goal, met, peers, limit)
        )
    right = sum(not one["failed"] for one in trials)
    what = f"{name}: no bit of a loss differs, ranks taken over as meant"
    lines.append(Line(what, f"{right} of {len(trials)}", "jobs", "all", right == len(trials), limit=limit))
    steps = sum(one.get("steps", 0) for one in trials)
    differ = sum(one.get("differing", 0) for one in trials)
    lines.append(Line(f"{name}: losses that differ", differ, f"of {steps} steps × {RANKS}", "0", differ == 0))
    return lines


def _faults(trials: Sequence[Mapping[str, Any]], what: str) -> list[Mapping[str, Any]]:
    return [one for told in trials for one in told.get("faults", ()) if one["what"] == what]


def main() -> None:
    parser = bench_arguments("stand_in.recoveries", "Recoveries of four ranks on the stand-in GPU.")
    parser.add_argument("--times", type=int, default=10, metavar="N", help="of each kind of fault (10)")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--way", choices=WAYS, help="default: both")
    arguments = parser.parse_args()
    report = Report("recoveries on the stand-in", quick=arguments.quick)
    kept = Trials(arguments.json and arguments.json.with_name(f"{arguments.json.stem}-trials.jsonl"))
    plain = Plain()
    for name in [arguments.way] if arguments.way else WAYS:
        trials: list[dict[str, Any]] = []
        count = 1 if arguments.quick else arguments.times
        for seed in range(arguments.first, arguments.first + count):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                trials.append(
                    kept.result(
                        name,
                        seed,
                        lambda way=WAYS[name], seed=seed, to=folder: trial(way, seed, plain, Path(to)),
                    )
                )
        for line in judged(name, trials):
            report.add(line)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
