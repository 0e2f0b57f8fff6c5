"""The real jobs of the mitigation bench: cases, the best that is possible, one trial, and what it says."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

JOB = Path(__file__).with_name("job.py")
MICROBATCH_S = 0.04
CROWDED_MICROBATCH_S = 0.12  # of 8 ranks on one core: they take it 27 ms an iteration, also without keepstep
FORWARD = 1 / 3  # of a micro-batch
EACH = 8  # micro-batches for each replica
BEFORE, AFTER = 60, 40  # iterations
WEAK, MEDIUM, SEVERE = 1.3, 2.0, 4.0
LEAST_SAVING = 0.05  # of an iteration: the product promises to do nothing for less
ROUNDING = 1e-9  # of the loss, in float64
_MOST_STEPS = 100_000
_PATIENCE_S = 120.0
_PATIENCE_STEPS = 300  # from the onset until shares change
_CONTROL_STEPS = 120  # from the onset where shares are to stay


@dataclass(frozen=True, slots=True)
class Case:
    """One job: its layout, and how many of its replicas turn how slow (one rank of each)."""

    replicas: int
    stages: int
    slow: int
    factor: float

    @property
    def name(self) -> str:
        layout = f"DP{self.replicas}" + (f"×PP{self.stages}" if self.stages > 1 else "")
        return f"{layout}, {self.slow} of {self.replicas} replicas ×{self.factor:g}"

    @property
    def count(self) -> int:
        """Micro-batches in a step."""
        return EACH * self.replicas

    @property
    def microbatch_s(self) -> float:
        """A healthy rank's micro-batch: long enough that the core, which all ranks share, does not count."""
        return CROWDED_MICROBATCH_S if self.replicas * self.stages > 4 else MICROBATCH_S

    def slowed(self, seed: int) -> dict[int, float]:
        """How slow which ranks turn."""
        rng = random.Random(f"{self.name}/{seed}")
        chosen = rng.sample(range(self.replicas), self.slow)
        return {replica * self.stages + rng.randrange(self.stages): self.factor for replica in chosen}


SEVERITIES = WEAK, MEDIUM, SEVERE
CASES = [
    *(Case(4, 1, 1, factor) for factor in SEVERITIES),  # the issue's, and figure 14's of 4 groups
    *(Case(2, 2, 1, factor) for factor in SEVERITIES),
    *(Case(2, 1, 1, factor) for factor in SEVERITIES),  # figure 14
    *(Case(8, 1, 1, factor) for factor in SEVERITIES),
    *(Case(4, 1, slow, MEDIUM) for slow in (2, 3, 4)),  # figure 15, left
]
QUICK_CASES = [Case(4, 1, 1, MEDIUM), Case(2, 2, 1, MEDIUM)]


class Row(NamedTuple):
    """A step as rank 0 has written it."""

    step: int
    at_s: float
    shares: list[int]
    factors: list[float]  # of the ranks
    loss: float


def replica_s(share: int, stages: Sequence[float]) -> float:
    """How long a replica takes for its micro-batches, given what one takes on each of its (one or two) stages: 1F1B."""
    if len(stages) == 1:
        return share * stages[0]
    forward, backward = FORWARD * stages[0], (1 - FORWARD) * stages[0]
    first = last = 0.0
    for _ in range(share):
        first += forward
        before, last = last, max(last, first) + stages[1]
        if before:
            first = max(first, before) + backward
    return max(first, last) + backward


def best_possible(replicas: Sequence[Sequence[float]], total: int) -> tuple[float, list[int]]:
    """The shortest iteration with these times of stages, and its shares: each micro-batch goes where it is done first.

    Exact, since a replica takes longer with each that it gets.
    """
    shares = [1] * len(replicas)
    for _ in range(total - len(replicas)):
        done = [replica_s(share + 1, stages) for share, stages in zip(shares, replicas, strict=True)]
        shares[done.index(min(done))] += 1
    return iteration_s(replicas, shares), shares


def iteration_s(replicas: Sequence[Sequence[float]], shares: Sequence[int]) -> float:
    """What an iteration takes with these shares, the reduction of gradients left out."""
    return max(replica_s(share, stages) for share, stages in zip(shares, replicas, strict=True))


def times(case: Case, slowed: dict[int, float]) -> list[list[float]]:
    """Seconds per micro-batch of each stage of each replica."""
    return [
        [
            case.microbatch_s * slowed.get(replica * case.stages + stage, 1.0)
            for stage in range(case.stages)
        ]
        for replica in range(case.replicas)
    ]  # fmt: skip


def judge(case: Case, rows: Sequence[Row], undisturbed: Sequence[float]) -> dict[str, Any]:
    """What a trial says: seconds per iteration before, slowed and after, against the best possible.

    How slow the ranks were is what they wrote themselves. ``after`` is the mean of all iterations that follow the one
    in which other shares came into force; where it is not worth the while that they do, of those late in the slowdown.
    """
    slow = [row.step for row in rows if sum(factor > 1 for factor in row.factors) == case.slow]
    if not slow:
        return {"failed": "no rank turned slow"}
    onset = slow[0]
    taken = [later.at_s - row.at_s for row, later in pairwise(rows)]  # of the later one
    took = {row.step: seconds for row, seconds in zip(rows[1:], taken, strict=True)}
    slowed = {rank: factor for rank, factor in enumerate(rows[-1].factors) if factor > 1}
    replicas, equal = times(case, slowed), [EACH] * case.replicas
    bound_s, best = best_possible(replicas, case.count)
    equal_s = iteration_s(replicas, equal)
    worth = bound_s < (1 - LEAST_SAVING) * equal_s
    changed = [row.step for row in rows if row.step >= onset and row.shares != equal]
    early = [row.step for row in rows if row.step < onset and row.shares != equal]
    errors = [
        abs(row.loss - loss) / abs(loss) for row, loss in zip(rows, undisturbed, strict=False)
    ]  # fmt: skip
    found: dict[str, Any] = {
        "onset_step": onset,
        "before_s": _mean(took, range(onset - BEFORE // 2, onset - 1)),
        "before_bound_s": iteration_s(times(case, {}), equal),
        "equal_s": equal_s,
        "bound_s": bound_s,
        "best": best,
        "worth": worth,
        "loss_error": max(errors),
        "losses": min(len(rows), len(undisturbed)),
        "shares": runs(rows),
        "failed": "",
    }
    if early:
        return {**found, "failed": f"shares changed at step {early[0]}, before a rank was slow"}
    if len(undisturbed) < len(rows):
        return {**found, "failed": "the undisturbed run is shorter"}
    if worth and not changed:
        return {**found, "failed": f"shares were equal for {rows[-1].step - onset} steps of the slowdown"}
    first = changed[0] if changed else rows[-1].step - AFTER
    after = range(first + 1, first + 1 + AFTER)
    if after[-1] > rows[-1].step:
        return {**found, "failed": f"only {rows[-1].step - first} iterations after step {first}"}
    found |= {
        "in_force_steps": first - onset if changed else None,
        "slowed_s": _mean(took, range(onset + 1, first)) if first > onset + 1 else None,
        "after_s": _mean(took, after),
        "after_median_s": statistics.median(took[step] for step in after),
    }
    found["ratio"] = found["after_s"] / bound_s
    return found


def _mean(took: dict[int, float], steps: range) -> float:
    return statistics.mean(took[step] for step in steps if step in took)


def runs(rows: Sequence[Row]) -> list[tuple[int, list[int]]]:
    """The shares, and from which step on."""
    runs: list[tuple[int, list[int]]] = []
    for row in rows:
        if not runs or runs[-1][1] != row.shares:
            runs.append((row.step, row.shares))
    return runs


def read(folder: Path) -> list[Row]:
    try:
        whole = (folder / "steps").read_text().rpartition("\n")[0]
    except OSError:
        return []
    return [Row(*json.loads(line)) for line in whole.splitlines()]


def command(case: Case, folder: Path, steps: int, seconds: float, *flags: str) -> list[str]:
    """Of one job."""
    keepstep = [
        sys.executable,
        "-m",
        "keepstep.cli",
        "run",
        "--run-dir",
        str(folder / "run"),
        "--no-validate",
    ]
    job = [str(JOB), str(folder), str(steps), str(case.count), str(case.stages), str(seconds)]
    return [*keepstep, "--nproc-per-node", str(case.replicas * case.stages), *flags, *job]


class Job:
    """A job under way, in a folder of its own; ended on leaving."""

    def __init__(self, command: list[str], folder: Path) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(JOB.parents[1])}
        self._folder = folder
        with (folder / "said").open("wb") as said:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=environ,
                start_new_session=True,
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def until(self, wanted: int, *, changed: bool = False) -> bool:
        """Wait for a number of steps, or until shares are ``changed`` if that is earlier: whether they are."""
        deadline_s = time.monotonic() + _PATIENCE_S
        made = -1
        while True:
            rows = read(self._folder)
            if changed and rows and len(set(rows[-1].shares)) > 1:
                return True
            if rows and rows[-1].step >= wanted:
                return False
            if rows and rows[-1].step > made:
                made, deadline_s = rows[-1].step, time.monotonic() + _PATIENCE_S
            if self._process.poll() is not None:
                raise RuntimeError(f"the job ended with {self._process.returncode}: {self.said()[-300:]}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no step after {made} within {_PATIENCE_S:.0f} s")
            time.sleep(0.2)

    def end(self) -> None:
        (self._folder / "enough").touch()
        if code := self._process.wait(60):
            raise RuntimeError(f"the job ended with {code}: {self.said()[-300:]}")

    def said(self) -> str:
        return (self._folder / "said").read_text(errors="replace")


def run(case: Case, seed: int) -> dict[str, Any]:
    """One trial: what `judge` says of it, and what keepstep said."""
    slowed = case.slowed(seed)
    with tempfile.TemporaryDirectory(prefix="keepstep-mitigate-") as name:
        folder = Path(name)
        with Job(command(case, folder, _MOST_STEPS, case.microbatch_s), folder) as job:
            job.until(BEFORE + random.Random(seed).randrange(16))
            draft = folder / "slow.draft"
            draft.write_text(json.dumps(slowed))
            draft.rename(folder / "slow")
            onset = read(folder)[-1].step
            bound_s, _ = best_possible(times(case, slowed), case.count)
            worth = bound_s < (1 - LEAST_SAVING) * iteration_s(times(case, slowed), [EACH] * case.replicas)
            if job.until(onset + (_PATIENCE_STEPS if worth else _CONTROL_STEPS), changed=True):
                job.until(read(folder)[-1].step + AFTER + 4)
            job.end()
            said = job.said()
        rows = read(folder)
        incidents = [
            json.loads(path.read_bytes()) for path in sorted((folder / "run/incidents").glob("[0-9]*.json"))
        ]
    found = {"slowed": slowed, **judge(case, rows, undisturbed(case, len(rows)))}
    found["incidents"] = [
        {
            "onset_step": one.get("onset_step"),
            "culprits": [culprit.get("rank") for culprit in one.get("culprits", [])],
            "actions": [f"{action['name']}: {action['detail']}" for action in one.get("actions", [])],
        }
        for one in incidents
    ]
    return found if not found["failed"] else {**found, "said": said[-2000:]}


def alone(case: Case) -> dict[str, Any]:
    """Seconds an iteration of the undisturbed job under torchrun, without keepstep, and what its computing takes."""
    with tempfile.TemporaryDirectory(prefix="keepstep-mitigate-") as name:
        folder = Path(name)
        ranks = str(case.replicas * case.stages)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        job = [
            str(JOB),
            str(folder),
            str(_MOST_STEPS),
            str(case.count),
            str(case.stages),
            str(case.microbatch_s),
        ]
        with Job([*torchrun, *job], folder) as running:
            running.until(BEFORE + AFTER)
            running.end()
        rows = read(folder)
    taken = [later.at_s - row.at_s for row, later in pairwise(rows)][BEFORE // 2 :]
    bound_s = iteration_s(times(case, {}), [EACH] * case.replicas)
    return {"alone_s": statistics.mean(taken), "bound_s": bound_s}


_undisturbed: dict[tuple[int, int], list[float]] = {}


def undisturbed(case: Case, steps: int) -> list[float]:
    """The losses of the same training with equal shares, and without emulated compute."""
    layout = case.replicas, case.stages
    if len(_undisturbed.get(layout, ())) < steps:
        steps = -(-steps // 256) * 256
        with tempfile.TemporaryDirectory(prefix="keepstep-mitigate-") as name:
            folder = Path(name)
            with Job(command(case, folder, steps, 0.0, "--mitigate", "off"), folder) as job:
                job.until(steps - 1)
                job.end()
            _undisturbed[layout] = [row.loss for row in read(folder)]
    return _undisturbed[layout]
