"""One real job in whose state a bit is turned over: who is named, when, and what the training comes to.

``judged`` looks at the incidents of the run and at the ranks' losses; what was done is compared with that afterwards.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.checkpoint_faults.campaign import NOT_OVER, ROOT, Judged, wait_for_the_end

JOB = Path(__file__).with_name("job.py")
STEPS, PAUSE_S = 24, 0.3
_FLIPPED = range(5, 15)  # steps at which a bit is turned over
_KINDS = ("adamw", "amsgrad", "momentum", "rmsprop", "sgd")
_PATIENCE_S = 240.0
_LOCK = Lock()


@dataclass(frozen=True)
class Plan:
    """What is done to one job.

    Attributes:
        ranks: of the job. Of three or more the job mends itself (``--on-corrupt restore``); of two a rank is killed
            ``killed_after_s`` after the verdict.
        kind: the optimizer.
        in_place: whether processes outlive restarts.
        flip: what the job's file ``flip-R`` says of the rank ``rank``.
    """

    ranks: int
    kind: str
    in_place: bool
    rank: int
    killed: int
    killed_after_s: float
    flip: dict[str, Any]


def drawn(when: str, chances: random.Random) -> Plan:
    """``when``: "after" the optimizer's step, just before the save; "before" the forward."""
    ranks = chances.choice((2, 3, 3, 4))
    return Plan(
        ranks,
        chances.choice(_KINDS),
        chances.random() < 0.5,
        chances.randrange(ranks),
        chances.randrange(ranks),
        round(chances.uniform(0.0, 1.5), 3),
        {
            "step": chances.choice(_FLIPPED),
            "when": when,
            "tensor": chances.randrange(1 << 20),
            "element": chances.randrange(1 << 20),
            "bit": chances.randrange(32),
        },
    )


@dataclass(frozen=True)
class Named:
    """What one incident says."""

    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    sure: bool
    since: int
    text: str


def carried_out(plan: Plan, folder: Path) -> Judged:
    """Run the job, see what is said of it, and compare that with what was done."""
    expected = undisturbed(plan.ranks, plan.kind)
    (folder / f"flip-{plan.rank}").write_text(json.dumps(plan.flip))
    code, said = _run(plan, folder)
    judged, named = judge(folder / "run", folder, plan.ranks, expected)
    judged.said = said
    if code is None:
        judged.why.append(f"{NOT_OVER} {_PATIENCE_S:g} s")
    elif code:
        judged.why.append(f"exit code {code}")
    if not (folder / "flipped").exists():
        judged.why.append("no bit was turned over")
        return judged
    truth = json.loads((folder / "flipped").read_text())
    judged.measured |= {"truth": truth, "named": [vars_of(one) for one in named]}
    if truth["when"] == "before" and not named and not judged.why:
        judged.measured["gone"] = True  # the step has overwritten the bit, and nothing came of it
        return judged
    judged.why += _compared(truth, plan.ranks, named)
    return judged


def vars_of(named: Named) -> dict[str, Any]:
    return {"ranks": named.ranks, "nodes": named.nodes, "since": named.since, "text": named.text}


def judge(
    run: Path, folder: Path, ranks: int, expected: Mapping[int, Mapping[int, str]]
) -> tuple[Judged, list[Named]]:
    """Who is named, and what is wrong with the losses, by the last that each rank had of each step."""
    judged, named = Judged(), []
    for path in sorted((run / "incidents").glob("*.json")):
        incident = json.loads(path.read_text())
        if incident["kind"] == "corrupt":
            ones = incident["culprits"]
            named.append(
                Named(
                    tuple(one["rank"] for one in ones),
                    tuple(one["node"] for one in ones),
                    all(one["confidence"] == "high" for one in ones),
                    incident["onset_step"],
                    ones[0]["detail"],
                )
            )
    for rank in range(ranks):
        if (found := last_losses(folder, rank)) != expected[rank]:
            odd = [step for step, loss in expected[rank].items() if found.get(step) != loss]
            judged.why.append(
                f"rank {rank}: {len(odd)} losses are not those of the undisturbed training: {odd[:5]}"
            )
    return judged, named


def _compared(truth: Mapping[str, Any], ranks: int, named: list[Named]) -> list[str]:
    if len(named) != 1:
        return [f"{len(named)} incidents"]
    one, why = named[0], list[str]()
    if one.ranks != ((0, 1) if ranks == 2 else (truth["rank"],)):
        why.append(f"ranks {one.ranks} are named")
    if one.sure != (ranks > 2):
        why.append("sure of one of two" if one.sure else "not sure")
    # While a forward runs, the step before is still being copied.
    possible = (truth["step"] + 1,) if truth["when"] == "after" else (truth["step"], truth["step"] + 1)
    if one.since not in possible:
        why.append(f"since step {one.since}, not {possible[-1]}")
    if truth["tensor"] not in one.text:
        why.append(f"not {truth['tensor']}: {one.text}")
    if not all(one.nodes):
        why.append("without a node")
    return why


def last_losses(folder: Path, rank: int) -> dict[int, str]:
    """The last losses of each step."""
    found: dict[int, str] = {}
    with suppress(OSError):
        for line in (folder / f"loss-{rank}").read_text().splitlines():
            step, _, loss = line.partition(" ")
            found[int(step)] = loss
    return found


def undisturbed(ranks: int, kind: str) -> dict[int, dict[int, str]]:
    """The losses of a training that nothing happens to, by rank. For use by several threads."""
    with _LOCK:
        return _undisturbed(ranks, kind)


@cache
def _undisturbed(ranks: int, kind: str) -> dict[int, dict[int, str]]:
    with tempfile.TemporaryDirectory() as name:
        command = _command(Path(name), ranks, kind, 0.0, ["--no-watch"])
        done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"the undisturbed training ended with {done.returncode}: {done.stderr[-400:]}")
        return {rank: last_losses(Path(name), rank) for rank in range(ranks)}


def _run(plan: Plan, folder: Path) -> tuple[int | None, str]:
    flags = ["--max-restarts", "2", *(("--in-place",) if plan.in_place else ())]
    flags += ["--on-corrupt", "restore"] if plan.ranks > 2 else []
    command = _command(folder, plan.ranks, plan.kind, PAUSE_S, flags)
    deadline_s = time.monotonic() + _PATIENCE_S
    with (folder / "console").open("w") as console:
        process = subprocess.Popen(command, env=_environment(), stdout=console, stderr=subprocess.STDOUT)
        try:
            if plan.ranks == 2:
                _kill_after_the_verdict(plan, folder, process, deadline_s)
            code = process.wait(max(deadline_s - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    wait_for_the_end(folder / "run")
    return code, (folder / "console").read_text()


def _kill_after_the_verdict(
    plan: Plan, folder: Path, process: subprocess.Popen[bytes], deadline_s: float
) -> None:
    while process.poll() is None and time.monotonic() < deadline_s:
        if any("CORRUPT" in path.read_text() for path in (folder / "run" / "incidents").glob("*.txt")):
            time.sleep(plan.killed_after_s)
            os.kill(int((folder / f"pid-{plan.killed}").read_text()), signal.SIGKILL)
            return
        time.sleep(0.02)


def _command(folder: Path, ranks: int, kind: str, pause_s: float, flags: list[str]) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "keepstep.cli",
        "run",
        "--no-check",
        "--nproc-per-node",
        str(ranks),
        *flags,
    ]
    return [*command, "--run-dir", f"{folder}/run", str(JOB), str(folder), str(STEPS), str(pause_s), kind]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
