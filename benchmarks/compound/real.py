"""The compound schedule on a real job: 8 ranks (DP4 x PP2) on four hosts, at a shortened time scale.

Hosts are network namespaces, ranks real processes on Gloo, computing is emulated by sleeping
(benchmarks/mitigate/job.py). The replicas of the schedule are taken modulo four; a slow link is that between the two
hosts of the stage. What is slow stays with the device or link, whatever ranks move there. Driven by the steps that
rank 0 writes; keepstep is told nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.compound.schedule import Event, Schedule
from benchmarks.mitigate import trial
from benchmarks.mitigate.trial import Row

REPLICAS, STAGES, RANKS_PER_HOST = 4, 2, 2
EACH = 8  # micro-batches of a replica
MICROBATCH_S = 0.02
BALLAST = 1 << 20  # bytes of gradients that each stage reduces besides
RATE_MBIT = 400  # of a healthy host
HOSTS = ("node-a", "node-b", "node-c", "node-d")
_LATE = 30  # iterations after the end of a slowdown, in which it may still be told
_HOUR_S = 3600
EMULATED = "computing emulated by sleeping, hosts are network namespaces of one machine, iterations of 0.2 s"
_PATIENCE_S = 120.0
_KEPT = ("steps", "said-*", "run/incidents/*", "run/nodes/*/iterations.jsonl")
_PAUSE_S = 1.0  # of an exchange, for the optimum


def device(event: Event) -> list[str]:
    """What is slow, as HOST/LOCAL_RANK."""
    rank = event.stage * REPLICAS + event.replica % REPLICAS
    host, local = divmod(rank, RANKS_PER_HOST)
    slow = range(RANKS_PER_HOST) if event.tp is None else (local,)
    return [f"{HOSTS[host]}/{one}" for one in slow]


def link(event: Event) -> tuple[str, str]:
    """The hosts between which replicas of this stage reduce their gradients."""
    first = event.stage * REPLICAS // RANKS_PER_HOST
    return HOSTS[first], HOSTS[first + 1]


class Injector:
    """Has the slowdowns of the schedule begin and end at their iterations."""

    def __init__(self, bed: Any, folder: Path, schedule: Schedule) -> None:
        self._bed, self._folder, self._schedule = bed, folder, schedule
        self._links = ExitStack()
        self._now: list[Event] = []
        self.began: dict[int, int] = {}  # iteration, by number

    def at(self, step: int) -> None:
        """So many iterations have been made."""
        now = self._schedule.at(step + 1)
        if now == self._now:
            return
        self._now = now
        for one in now:
            self.began.setdefault(one.number, step + 1)
        slow: dict[str, float] = {}
        for one in now:
            for name in device(one) if one.kind == "compute" else ():
                slow[name] = slow.get(name, 1.0) * one.times
        draft = self._folder / "slow.draft"
        draft.write_text(json.dumps(slow))
        draft.rename(self._folder / "slow")
        self._links.close()
        for one in now:
            if one.kind == "link":
                self._slow_link(one)

    def _slow_link(self, event: Event) -> None:
        from keepstep.faults import SlowLink

        rate = f"{round(1000 * RATE_MBIT / event.times)}kbit"
        self._links.enter_context(self._bed.links.inject(SlowLink(*link(event), rate)))


def run(
    schedule: Schedule | None, iterations: int, mitigate: str, keep: Path | None = None
) -> dict[str, Any]:
    """One job over so many iterations, with the slowdowns of ``schedule`` or none.

    ``keep``: a folder for what tells why it went as it did: steps, iterations of all ranks, incidents, what was said.
    """
    from tests.e2e import testbed

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepstep-compound-")))
        offsets = [hours * _HOUR_S for hours in (0, 5, 11, 30)]
        bed = stack.enter_context(testbed.four_hosts(offsets, rate=f"{RATE_MBIT}mbit"))
        running = {
            name: host.start(["sh", "-c", 'exec "$@" >"$0" 2>&1', str(folder / f"said-{name}"), *_command(
                folder, number, iterations, mitigate)], {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()})
            for number, (name, host) in enumerate(bed.hosts.items())
        }  # fmt: skip
        injector = Injector(bed, folder, schedule or Schedule(iterations, ()))
        made, deadline_s = -1, time.monotonic() + _PATIENCE_S
        while any(one.poll() is None for one in running.values()):
            rows = trial.read(folder)
            if rows and rows[-1].step > made:
                made, deadline_s = rows[-1].step, time.monotonic() + _PATIENCE_S
                injector.at(made)
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.05)
        codes = {name: one.returncode for name, one in testbed.collect(running, 30).items()}
        rows = trial.read(folder)
        said = (folder / f"said-{HOSTS[0]}").read_text(errors="replace")
        incidents = [
            json.loads(path.read_bytes()) for path in sorted((folder / "run/incidents").glob("[0-9]*.json"))
        ]
        if keep is not None:
            for path in (path for pattern in _KEPT for path in folder.glob(pattern)):
                kept = keep / path.relative_to(folder)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, kept)
    found = judge(schedule, iterations, rows, incidents)
    if set(codes.values()) != {0}:
        found["failed"] = f"exit codes {codes}; {said[-300:]}"
    return {**found, "began": injector.began}


def _command(folder: Path, number: int, iterations: int, mitigate: str) -> list[str]:
    return [
        *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run"), "--no-validate"),
        *("--nnodes", "4", "--node-rank", str(number), "--master-addr", HOSTS[0], "--master-port", "29555"),
        *("--nproc-per-node", str(RANKS_PER_HOST), "--max-restarts", "1"),
        *("--in-place", "--standbys", str(RANKS_PER_HOST), "--mitigate", mitigate),
        *(str(trial.JOB), str(folder)),
        *(str(iterations), str(EACH * REPLICAS), str(STAGES), str(MICROBATCH_S), str(BALLAST)),
    ]


def judge(
    schedule: Schedule | None, iterations: int, rows: list[Row], incidents: list[dict[str, Any]]
) -> dict[str, Any]:
    """How long it took, from the first step to the last, and which slowdowns were told.

    A pause is in it, and what was made again is in the time but not in the count.
    """
    made = {row.step for row in rows}
    found: dict[str, Any] = {
        "iterations": len(made),
        "seconds": rows[-1].at_s - rows[0].at_s if rows else None,
        "median_s": statistics.median(later.at_s - row.at_s for row, later in pairwise(rows))
        if rows
        else None,
        "shares": trial.runs(rows),
        "failed": "" if len(made) == iterations else f"{len(made)} of {iterations} iterations",
        "actions": [f"{one['name']}: {one['detail']}" for each in incidents for one in each["actions"]],
    }
    if schedule is not None:
        found["link_s"] = _link_s(schedule, rows)
        found["reactions"] = {one.number: _reaction(one, incidents) for one in schedule.events}
    return found


def _reaction(event: Event, incidents: list[dict[str, Any]]) -> int | None:
    """Iterations from the onset until the device or link was named; None: it was not."""
    hosts = {name.partition("/")[0] for name in device(event)}
    named: list[int] = []
    for one in incidents:
        step = one["detected_step"]
        if step is None or not event.first <= step <= event.last + _LATE:
            continue
        for culprit in one["culprits"]:
            ends = culprit["link"]["nodes"] if culprit["link"] else ()
            is_it = set(ends) == set(link(event)) if event.kind == "link" else culprit["node"] in hosts
            if is_it:
                named.append(step - event.first)
    return min(named, default=None)


def missing() -> str:
    """Why there can be no hosts here; "": there can."""
    from tests.e2e import testbed

    return testbed.missing()


def _link_s(schedule: Schedule, rows: list[Row]) -> float:
    """What a slow link adds to an iteration without remedies: where it is the only one that is slow, else at least."""
    took = {later.step: later.at_s - row.at_s for row, later in pairwise(rows)}
    added: list[float] = []
    for one in schedule.events:
        if one.kind == "link":
            slowed = [took[step] for step in range(one.first + 2, one.last) if step in took]
            before = [took[step] for step in range(one.first - 12, one.first - 2) if step in took]
            if slowed and before:
                added.append(max(statistics.median(slowed) - statistics.median(before), 0.0))
    return min(added, default=0.0)


def optimum_s(schedule: Schedule, healthy_s: float, link_s: float) -> float:
    """What the run takes at least for who knows the schedule: shares that fit each stretch, exchanges where they pay.

    ``healthy_s``: an undisturbed iteration; ``link_s``: what a slow link adds to one.
    """
    total_s, iterations = 0.0, schedule.iterations
    even_s = trial.iteration_s([[MICROBATCH_S] * STAGES] * REPLICAS, [EACH] * REPLICAS)
    for first, after in pairwise(sorted({*schedule.edges, iterations})):
        now = schedule.at(first)
        times = [
            [_slowness(now, replica, stage) * MICROBATCH_S for stage in range(STAGES)]
            for replica in range(REPLICAS)
        ]
        best_s = trial.best_possible(times, EACH * REPLICAS)[0]
        total_s += (after - first) * (healthy_s - even_s + best_s)
    for one in schedule.events:
        if one.kind == "link":
            total_s += min((one.last - one.first + 1) * link_s, 2 * _PAUSE_S)
    return total_s


def _slowness(now: list[Event], replica: int, stage: int) -> float:
    rank = stage * REPLICAS + replica
    host, local = divmod(rank, RANKS_PER_HOST)
    found = 1.0
    for one in now:
        if one.kind == "compute" and f"{HOSTS[host]}/{local}" in device(one):
            found *= one.times
    return found
