"""What the campaigns of checkpoints and recovery share: ranks' notes, their judges, and seeds without a result run.

Judges look at what the ranks wrote, at what was promised and at bytes; never at what was injected.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks._intervals import wilson
from benchmarks._report import Line, Report
from benchmarks.campaign.seeds import keep, kept
from benchmarks.campaign.trial import processes_of

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("job.py")
NOT_OVER = "not over after"  # so begins what is wrong with a seed that ran out of time
GOAL = "0 wrong restores, 0 lost checkpoints that were promised"

Note = dict[str, Any]
Losses = dict[int, set[str]]


def moment(chances: random.Random, longest: float = -1.5) -> float:
    """From microseconds, in which a record is written, to tens of milliseconds, in which a state is copied."""
    return 10 ** chances.uniform(-5, longest)


def steps_on(storage: Path) -> list[Path]:
    """Folders of steps on storage, whole or not."""
    return sorted(storage.glob("step-*"))


def whole_steps(storage: Path) -> list[int]:
    """Steps on storage that have a manifest: those that are promised."""
    return [int(path.name.split("-")[1]) for path in steps_on(storage) if (path / "manifest.json").exists()]


def wait_for_the_end(run_folder: Path) -> None:
    """Until all that a killed launcher started has ended."""
    deadline = time.monotonic() + 30
    while processes_of(run_folder) and time.monotonic() < deadline:
        time.sleep(0.05)


def ledger(folder: Path, rank: int) -> list[Note]:
    """What a rank noted; a last line that its death cut short is left out."""
    found: list[Note] = []
    with suppress(OSError):
        for line in (folder / f"ledger-{rank}").read_text().splitlines():
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found


def losses(folder: Path, rank: int) -> Losses:
    """All losses of each step, of whatever incarnation."""
    found: Losses = {}
    with suppress(OSError):
        for line in (folder / f"loss-{rank}").read_text().splitlines():
            step, _, loss = line.partition(" ")
            found.setdefault(int(step), set()).add(loss)
    return found


_ONE_AT_A_TIME = Lock()


def undisturbed(world: int, steps: int) -> dict[int, Losses]:
    """The losses of a training that nothing happens to, by rank. For use by several threads."""
    with _ONE_AT_A_TIME:
        return _undisturbed(world, steps)


@cache
def _undisturbed(world: int, steps: int) -> dict[int, Losses]:
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "keepstep.cli", "run", "--no-watch", "--nproc-per-node", str(world)]
        command += ["--run-dir", f"{name}/run", str(JOB), name, str(steps), "0", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the undisturbed training ended with {done.returncode}: {done.stderr[-400:]}")
        return {rank: losses(Path(name), rank) for rank in range(world)}


def went_on(
    notes: Mapping[int, Sequence[Note]],
    which: Callable[[Note], bool],
    promised: int,
    measured: dict[str, Any],
) -> list[str]:
    """What is wrong with where an incarnation went on from."""
    starts = {n["step"] for own in notes.values() for n in own if n["what"] == "resumed" and which(n)}
    measured["resumed"], measured["promised"] = sorted(starts), promised
    if len(starts) != 1:
        return [f"the ranks went on from steps {sorted(starts)}"]
    if min(starts) < promised:
        return [f"step {promised} was promised, the job went on from {min(starts)}"]
    return []


def wrong_bytes(rank: int, own: Sequence[Note]) -> Iterator[str]:
    """What came back otherwise than it was saved, and what changed while it was copied."""
    sums: dict[int, set[int]] = {}
    for note in own:
        if note["what"] == "saved":
            sums.setdefault(note["step"], set()).add(note["sum"])
    for note in own:
        if note["what"] == "still" and not note["same"]:
            yield f"rank {rank}: the state changed while step {note['step']} was copied"
        if note["what"] == "resumed" and note["found"] and {note["sum"]} != sums.get(note["step"]):
            yield f"rank {rank}: what came back as step {note['step']} is not what was saved"


def other_losses(folder: Path, expected: Mapping[int, Losses], steps: int) -> Iterator[str]:
    """Ranks whose losses are not those of the undisturbed training (``expected``, by rank), bit by bit.

    All that there are, also of steps that an earlier incarnation did and the last one, of ``steps`` steps, did not.
    """
    for rank, of_rank in expected.items():
        found = losses(folder, rank)
        if not found.keys() >= set(range(steps)) or any(found[step] != of_rank.get(step) for step in found):
            yield f"rank {rank}: its losses are not those of the undisturbed training"


@dataclass
class Judged:
    """How a seed ended. ``why``: what is wrong, a line each."""

    why: list[str] = field(default_factory=list[str])
    measured: dict[str, Any] = field(default_factory=dict[str, Any])
    kills: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    said: str = ""


def is_undecided(result: Mapping[str, Any]) -> bool:
    """Whether a seed was not over in time (an overloaded machine) or its testbed broke, and has not been run again."""
    broken = (NOT_OVER, "CalledProcessError:")
    return "earlier" not in result and any(why.startswith(broken) for why in result["why"])


@dataclass(frozen=True)
class Campaign:
    """Cases with a plan for each seed.

    Attributes:
        name: of the module.
        doc: its docstring.
        cases: how a plan (a dataclass) is drawn.
        carry_out: a plan in a new folder, to be judged.
        before: what all seeds need, made once.
        summary: name of the summary's file.
        limit: what the figures do not show.
        goal: of every case.
        results: name of their folder.
        seeds: how many there are to be.
    """

    name: str
    doc: str | None
    cases: Mapping[str, Callable[[random.Random], Any]]
    carry_out: Callable[[Any, Path], Judged]
    before: Callable[[], object]
    summary: str
    limit: str
    goal: str = GOAL
    results: str = "checkpoint-faults"
    seeds: int = 100

    def run_seed(self, case: str, seed: int, out: Path) -> dict[str, Any]:
        """Run one seed and keep its result; one that is there is kept in it, as ``earlier``."""
        earlier = kept(out, case).get(seed)
        plan = self.cases[case](random.Random(f"{case}:{seed}"))
        with tempfile.TemporaryDirectory() as name:
            folder, began = Path(name), time.monotonic()
            try:
                judged = self.carry_out(plan, folder)
            except Exception as error:  # a seed that breaks is a failed seed, and the campaign goes on
                judged = Judged([f"{type(error).__name__}: {error}"])
            result = {
                "case": case,
                "seed": seed,
                "passed": not judged.why,
                "why": judged.why,
                "measured": judged.measured,
                "plan": asdict(plan),
                "kills": judged.kills,
                "wall_s": round(time.monotonic() - began, 1),
                "console": judged.said[-4000:].replace(name, "FOLDER") if judged.why else "",
                **({"earlier": earlier} if earlier else {}),
            }
            keep(out, result)
            if judged.why:
                runs = ROOT / "runs" / self.results
                shutil.copytree(folder, runs / f"{case}-{seed:03d}", dirs_exist_ok=True)
        return result

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run what the command line asks for and summarise all results that are there."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.name}",
            description=self.doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--case", action="append", choices=(*self.cases, "all"), required=True)
        parser.add_argument(
            "--seeds", type=int, default=self.seeds, help=f"seeds 0 to N-1 (default: {self.seeds})"
        )
        parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / self.results)
        parser.add_argument("--parallel", type=int, default=1, metavar="N", help="jobs at once")
        parser.add_argument(
            "--again",
            action="store_true",
            help="run seeds once more that ran out of time or whose testbed broke; both results are kept",
        )
        parser.add_argument(
            "--summary-only", action="store_true", help="run nothing, summarise what is there"
        )
        parser.add_argument("--json", type=Path, help="where to write the summary (default: in --out)")
        arguments = parser.parse_args(argv)
        report = Report(self.name, quick=False)
        for case in self.cases if "all" in arguments.case else dict.fromkeys(arguments.case):
            self._run_case(case, arguments, report)
        report.finish(arguments.json or arguments.out / self.summary)
        return 0

    def _run_case(self, case: str, arguments: argparse.Namespace, report: Report) -> None:
        done = kept(arguments.out, case)
        todo = [seed for seed in range(arguments.seeds) if seed not in done]
        if arguments.again:
            todo += sorted(seed for seed, result in done.items() if is_undecided(result))
        if todo and not arguments.summary_only:
            self.before()
            with ThreadPoolExecutor(arguments.parallel) as pool:
                for result in pool.map(lambda seed: self.run_seed(case, seed, arguments.out), todo):
                    state = "passed" if result["passed"] else "FAILED: " + "; ".join(result["why"])
                    print(f"{case} seed {result['seed']}: {state} ({result['wall_s']} s)", flush=True)
        results = list(kept(arguments.out, case).values())
        if not results:
            report.leave_out(case, "no results")
            return
        passed = sum(result["passed"] for result in results)
        low, high = wilson(passed, len(results))
        limit = f"Wilson 95 %: {low:.2f} to {high:.2f}; {self.limit}"
        if again := sum("earlier" in result for result in results):
            limit += f"; {again} of them run again (out of time, testbed broken, a fault mended: see `earlier` there)"
        report.add(
            Line(case, f"{passed}/{len(results)}", "seeds", self.goal, passed == len(results), limit=limit)
        )
