"""Aborted collectives behind which an optimizer step stands: does any feed one, and are the ranks at one step after it?

    python -m benchmarks.stand_in.aborts [--seeds N] [--gate kept|open|none ...] [--json FILE]

Each seed is one abort of a Session's training whose device is behind its host, so that the optimizer's kernels and the
snapshot of the step stand behind the collective when that is aborted. Eight seeds in a row draw DDP or FSDP2, and 2 or
4 ranks, and share one job. Those with an odd number kill a rank, or have it raise an error; the others go on in their
processes. In those with an even number all ranks are healthy: the links of one rank, or of all, fail, and all go on in
their processes. Judged is each abort by itself:

- fed: on some rank a kernel of the optimizer's ran on a gradient that was not reduced, while nothing there knew of the
  abort, so that its step could be sealed. The stand-in asks when the kernel runs.
- mixed: a loss after the abort is not that of a training that nothing happened to, bit by bit. The job is not used any
  more.
- apart: ranks did not begin again with the same step.

``kept`` is the training as it is, ``none`` the same without the gate and without what knows of aborts; with ``open``
only the stream is not held, with ``unseen`` keepstep knows that it would know of no abort. ``make cuda`` first. With
FILE, the trials are kept beside it (``FILE-trials.jsonl``).
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks._report import Line, Report, bench_arguments
from benchmarks._trials import Trials
from benchmarks.stand_in.launch import Job, run, start

JOB = Path(__file__).with_name("jobs") / "session.py"
STEPS, SEEDS_OF_A_JOB = 900, 8
PATIENCE_S = 240.0
_SETTINGS = {
    "STAND_IN_KERNEL_US": "reduction=30000",  # a step takes the device longer than its host
    "KEEPSTEP_STANDBY_IDLE_S": "0.5",
    "TOLD_S": "1",  # nothing but time hangs on it
    "KEEPSTEP_LEAVE_S": "60",  # that a machine is busy is no reason to replace a process
}
ABORTED = {  # torch's watchdog aborts, and ends no process: keepstep sets this itself where it preloads the shim
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_FLAGS = ("--max-restarts", "100", "--restart-budget", "rank=0,node=0,hour=0", "--verbose")

Gate = Literal["kept", "open", "none", "unseen"]
Losses = list[dict[int, set[str]]]


class Drawn(NamedTuple):
    """What a seed is."""

    layout: str
    buckets: str  # "one": a step has one reduction, so that one rank may have it and another not
    ranks: int
    kind: str  # "die", "raise", or "lose-links"
    concerned: tuple[int, ...]  # ranks to which it happens
    where: str  # phase of the step
    after: int  # steps since the ranks began

    @property
    def is_healthy(self) -> bool:
        return self.kind == "lose-links"


def drawn(seed: int) -> Drawn:
    job = random.Random(f"job {seed // SEEDS_OF_A_JOB}")
    layout, ranks = job.choice(("ddp", "fsdp2")), job.choice((2, 2, 2, 4))
    buckets = job.choice(("one", "several"))
    draw = random.Random(seed)
    kind = draw.choice(("die", "die", "raise")) if seed % 2 else "lose-links"
    one = (draw.randrange(ranks),)
    concerned = tuple(range(ranks)) if kind == "lose-links" and draw.random() < 0.5 else one
    where, after = draw.choice(("forward", "backward", "optimizer")), draw.randrange(4, 16)
    return Drawn(layout, buckets, ranks, kind, concerned, where, after)


class Noted(NamedTuple):
    """The loss of a step that a rank has noted."""

    incarnation: int
    step: int
    loss: str


class Begun(NamedTuple):
    """How a rank began."""

    step: int
    process: str
    held: int  # the newest step that it had sealed


def noted_in(folder: Path, rank: int) -> Iterator[Noted]:
    path = folder / f"losses-{rank}"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []  # whole ones
    for line in lines:
        step, loss, _, *incarnation = line.split()
        yield Noted(int(incarnation[0]) if incarnation else 0, int(step), loss)


def losses_of(folder: Path, ranks: int, incarnation: int | None = None) -> Losses:
    """Of each rank the losses of each step that it noted, in one incarnation or in all."""
    found: Losses = []
    for rank in range(ranks):
        steps: dict[int, set[str]] = defaultdict(set)
        for one in noted_in(folder, rank):
            if incarnation in (None, one.incarnation):
                steps[one.step].add(one.loss)
        found.append(dict(steps))
    return found


def begun_in(folder: Path, ranks: int) -> dict[int, dict[int, Begun]]:
    """How ranks began, by incarnation and rank."""
    found: dict[int, dict[int, Begun]] = defaultdict(dict)
    for rank in range(ranks):
        path = folder / f"begun-{rank}"
        for line in path.read_text().split("\n")[:-1] if path.exists() else []:
            incarnation, step, process, held = line.split()
            found[int(incarnation)][rank] = Begun(int(step), process, int(held))
    return dict(found)


@cache
def undisturbed(layout: str, buckets: str, ranks: int, steps: int = STEPS) -> Losses:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        settings = {"LAYOUT": layout, "BUCKETS": buckets}
        done = run(
            JOB, [str(steps), name], folder, ranks=ranks, values=True, settings=settings, timeout_s=900
        )
        if done.exit_code != 0:
            raise RuntimeError(f"undisturbed: {done.console[-3000:]}")
        return losses_of(folder, ranks)


def differing(found: Losses, whole: Losses) -> int:
    """How many steps' losses, over all ranks, are not those of the undisturbed training."""
    return sum(
        losses != before[step]
        for steps, before in zip(found, whole, strict=True)
        for step, losses in steps.items()
    )


class Running:
    """A job in which one abort follows another."""

    def __init__(
        self,
        layout: str,
        buckets: str,
        ranks: int,
        gate: Gate,
        *,
        in_place: bool = True,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """``in_place``: else torch's watchdog ends a process once it has aborted, and all are replaced.

        ``more``: settings besides.
        """
        self.ranks, self.aborts, self._whole = ranks, 0, undisturbed(layout, buckets, ranks)
        self._deaths = 0
        self._kept = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.folder = Path(self._kept.name)
        settings = {"LAYOUT": layout, "BUCKETS": buckets, "GATE": gate, **_SETTINGS}
        if gate in ("none", "unseen"):
            settings |= {"KEEPSTEP_NCCL_SHIM": "0", **(ABORTED if gate == "none" else {})}
        if not in_place:
            settings |= {**ABORTED, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "STAND_IN_ABORT": "slow"}
        settings |= more or {}
        self._job: Job = start(
            *(JOB, [str(STEPS), str(self.folder)], self.folder),
            ranks=ranks,
            values=True,
            settings=settings,
            flags=(*_FLAGS, *(["--in-place"] if in_place else [])),
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self._job.is_over():
            os.kill(self._job.launcher, signal.SIGTERM)
        self._job.finish(60)
        self._kept.cleanup()

    @property
    def said(self) -> str:
        """All that was on the console."""
        return self._job.console()

    @property
    def is_near_its_end(self) -> bool:
        """Whether what the next abort takes may not fit into the steps that are left."""
        return max(max(steps, default=0) for steps in losses_of(self.folder, self.ranks)) > STEPS - 250

    def abort(self, one: Drawn) -> dict[str, Any]:
        """Have it happen, and judge what came of it."""
        now, following, whole = self.aborts, self.aborts + 1, self._whole
        self._wait_for(lambda: self._least(now) >= one.after)
        if not one.is_healthy:
            self._wait_for(lambda: self._job.console().count("standbys are warm") > self._deaths, 30)
            self._deaths += 1
        seen = [len(self._device(rank)) for rank in range(self.ranks)]
        step = max(max(steps) for steps in losses_of(self.folder, self.ranks, now)) + 6
        began_s = time.monotonic()
        for rank in one.concerned:
            (self.folder / f"order-{rank}").write_text(f"{one.kind} {one.where} {step}")
        self._wait_for(lambda: len(begun_in(self.folder, self.ranks).get(following, {})) == self.ranks)
        took_s = round(time.monotonic() - began_s, 1)
        self._wait_for(lambda: self._least(following) >= 4)
        self.aborts += 1
        begun = begun_in(self.folder, self.ranks)
        device = [self._device(rank)[before:] for rank, before in enumerate(seen)]
        stayed = [
            rank for rank in range(self.ranks) if begun[now][rank].process == begun[following][rank].process
        ]
        outcome = {
            "fed": sum("fed unknown" in line for lines in device for line in lines),
            "mixed": differing(losses_of(self.folder, self.ranks, following), whole),
            "apart": len({rank.step for rank in begun[following].values()}) > 1,
            # Losses of steps behind the abort that the script was told before it was left.
            "told": differing(losses_of(self.folder, self.ranks, now), whole),
            "aborted": sum(line.startswith("aborted") for lines in device for line in lines),
            "drained": sum("fed known" in line for lines in device for line in lines),
            "held": sum(line.startswith("held") for lines in device for line in lines),
            "step": step,
            "begun": sorted({rank.step for rank in begun[following].values()}),
            "held_by": [begun[following][rank].held for rank in range(self.ranks)],
            "in_place": len(stayed),
            "restart_s": took_s,
        }
        should_stay = self.ranks if one.is_healthy else self.ranks - 1
        right = not (outcome["fed"] or outcome["mixed"] or outcome["apart"]) and len(stayed) == should_stay
        return {
            **one._asdict(),
            **outcome,
            "failed": "" if right else "\n".join([*map(str, device), self._job.console()[-2500:]]),
        }

    def _least(self, incarnation: int) -> int:
        """How many losses the slowest rank has noted in an incarnation."""
        return min(len(steps) for steps in losses_of(self.folder, self.ranks, incarnation))

    def _device(self, rank: int) -> list[str]:
        path = self.folder / "devices" / f"rank-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def _wait_for(self, has_come: Callable[[], bool], least_s: float = PATIENCE_S) -> None:
        """Wait until it has; RuntimeError when it does not, but for what need not come."""
        until_s = time.monotonic() + least_s
        while not has_come():
            if self._job.is_over() or time.monotonic() > until_s:
                if least_s < PATIENCE_S and not self._job.is_over():
                    return
                raise RuntimeError(self._job.console()[-3000:])
            time.sleep(0.1)  # each look reads all that the ranks have noted, and two cores are theirs


class Bed:
    """The job that runs now, for the seeds that share it."""

    def __init__(self, gate: Gate) -> None:
        self._gate: Gate = gate
        self._running: Running | None = None
        self._number = -1

    def __enter__(self) -> Bed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def trial(self, seed: int) -> dict[str, Any]:
        one, number = drawn(seed), seed // SEEDS_OF_A_JOB
        if self._running and (self._number != number or self._running.is_near_its_end):
            self.close()
        if self._running is None:
            self._running = Running(one.layout, one.buckets, one.ranks, self._gate)
        self._number = number
        try:
            found = self._running.abort(one)
        except BaseException:
            self.close()
            raise
        if found["mixed"]:
            self.close()  # all that follows would differ
        return found

    def close(self) -> None:
        if self._running:
            self._running.close()
            self._running = None


def judged(trials: Sequence[Mapping[str, Any]], gate: Gate) -> list[Line]:
    """The figures of the trials with this gate."""
    limit = "a stand-in for the GPU whose operators compute"
    limit += {"kept": "", "open": "; streams are not held"}.get(gate, "; without the gate")
    halves = {
        "a rank dead": [one for one in trials if one.get("kind") in ("die", "raise")],
        "all healthy": [one for one in trials if one.get("kind") == "lose-links"],
    }
    lines: list[Line] = []
    for half, ours in halves.items():
        passed = sum(not one["failed"] for one in ours)
        lines.append(Line(f"{gate}: aborts passed, {half}", f"{passed} of {len(ours)}", "", "all",
                          passed == len(ours), limit=limit))  # fmt: skip
        for what, name in (
            ("steps fed", "fed"),
            ("losses mixed", "mixed"),
            ("ranks begun a step apart", "apart"),
        ):
            count = sum(bool(one.get(name)) for one in ours)
            lines.append(Line(f"{gate}: aborts with {what}, {half}", count, "", "0", count == 0, limit=limit))
    apart = sum(len(set(one.get("held_by", []))) > 1 for one in trials)
    lines.append(Line(f"{gate}: aborts at which ranks had sealed different steps", apart, "", limit=limit))
    lost = sum("kind" not in one for one in trials)
    lines.append(Line(f"{gate}: trials that came to no end", lost, "", "0", lost == 0, limit=limit))
    return lines


def main() -> None:
    parser = bench_arguments(
        "stand_in.aborts", "Aborted collectives before an optimizer step, on the stand-in GPU."
    )
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--gate", choices=("kept", "open", "none"), nargs="+", default=["kept", "none"])
    arguments = parser.parse_args()
    report = Report("aborts on the stand-in", quick=arguments.quick)
    kept = Trials(arguments.json and arguments.json.with_name(f"{arguments.json.stem}-trials.jsonl"))
    count = 4 if arguments.quick else arguments.seeds
    trials: dict[Gate, list[dict[str, Any]]] = {gate: [] for gate in arguments.gate}
    seeds = range(arguments.first, arguments.first + count)
    for _, job in groupby(seeds, lambda seed: seed // SEEDS_OF_A_JOB):
        of_one = list(job)
        for gate, found in trials.items():  # they share what is compared with
            with Bed(gate) as bed:
                found += [
                    kept.result(f"aborts, gate {gate}", seed, lambda seed=seed, bed=bed: bed.trial(seed))
                    for seed in of_one
                ]
    for gate, found in trials.items():
        for line in judged(found, gate):
            report.add(line)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
