"""Ranks that move, on four hosts (network namespaces, real processes, Gloo): remedies S3 and S4.

Two pipelines of two stages in data parallel (tests/e2e/exchange_train.py; computing emulated by sleeping). S3: the link
between two hosts of a data-parallel pair is throttled, in both directions and for nobody else, and later restored. S4:
two hosts of two ranks each and a spare; one turns slow for good. keepstep is told nothing. Drawn by the seed: which
link, how slow, when.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

JOB = Path(__file__).parents[2] / "tests/e2e/exchange_train.py"
COMPUTE_S = 0.03
RANKS, HOSTS = 4, 4
BEFORE, AFTER = 120, 60  # iterations, from the begin and after each change
PAUSE_GOAL_S = 5.0
EMULATED = "computing emulated by sleeping, hosts are network namespaces of one machine"
_MOST_STEPS = 100_000
_PATIENCE_S = 240.0
_SETTLE = 10  # iterations that are left out: the first after a change
HOUR_S = 3600


class Row(NamedTuple):
    """A step as a rank has written it: ``seconds`` it took, ``at_s`` (Unix time) it was over."""

    step: int
    value: str
    seconds: float
    at_s: float


def missing() -> str:
    """Why there can be no hosts here; "": there can."""
    from tests.e2e import testbed

    return testbed.missing()


class Job:
    """One job under way on the hosts, watched through what it writes."""

    def __init__(self, bed: Any, folder: Path, nodes: int, ranks: int, spares: int) -> None:
        self.folder, self.run = folder, folder / "run"
        self._members = nodes
        self.running: dict[str, Any] = {}
        for number, host in enumerate(list(bed.hosts.values())[: nodes + spares]):
            said = ["sh", "-c", 'exec "$@" 2>"$0"', str(folder / f"said-{number}")]
            command = [*said, *self._command(number, nodes, ranks)]
            self.running[host.name] = host.start(command, {"OMP_NUM_THREADS": "1"})

    def _command(self, number: int, nodes: int, ranks: int) -> list[str]:
        return [
            *(sys.executable, "-m", "keepstep.cli", "run", "-v", "--run-dir", str(self.run)),
            *("--nnodes", str(nodes), "--node-rank", str(number), "--master-addr", "node-a"),
            *("--master-port", "29555", "--nproc-per-node", str(ranks), "--max-restarts", "1"),
            *("--standbys", str(ranks), "--no-validate", str(JOB), str(self.folder), str(_MOST_STEPS)),
            str(COMPUTE_S),
        ]

    def rows(self, rank: int = 0) -> list[Row]:
        return read(self.folder, rank)

    def made(self) -> int:
        """Steps that rank 0 has written, those that were made again among them."""
        return len(self.rows())

    def warm(self, times: int = 1) -> bool:
        """Whether all members have said so often that their standbys are warm."""
        said = [self.folder / f"said-{number}" for number in range(self._members)]
        texts = [path.read_text(errors="replace") if path.exists() else "" for path in said]
        return all(text.count("standbys are warm") >= times for text in texts)

    def until(self, what: str, condition: Callable[[], Any], may_end: str = "") -> None:
        deadline_s = time.monotonic() + _PATIENCE_S
        while not condition():
            if ended := [name for name, one in self.running.items() if one.poll() and name != may_end]:
                raise RuntimeError(f"while waiting for {what}: {', '.join(ended)} ended")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"waited {_PATIENCE_S:.0f} s for {what}")
            time.sleep(0.1)

    def more(self, steps: int, may_end: str = "") -> None:
        """So many further steps."""
        wanted = self.made() + steps
        self.until(f"{steps} steps", lambda: self.made() >= wanted, may_end)

    @property
    def incarnation(self) -> int:
        try:
            return json.loads((self.run / "status.json").read_bytes()).get("incarnation", 0)
        except (OSError, ValueError):
            return 0

    def end(self) -> dict[str, int]:
        """Exit codes by host."""
        from tests.e2e import testbed

        (self.folder / "enough").touch()
        return {name: one.returncode for name, one in testbed.collect(self.running, 120).items()}


def read(folder: Path, rank: int) -> list[Row]:
    """What a rank has written so far."""
    path = folder / f"losses-{rank}"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    found = (line.split() for line in whole.splitlines())
    return [Row(int(step), value, float(seconds), float(at_s)) for step, value, seconds, at_s in found]


@contextmanager
def _job(nodes: int, ranks: int, spares: int = 0) -> Generator[tuple[Any, Job]]:
    from tests.e2e import testbed

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="keepstep-moves-")))
        bed = stack.enter_context(testbed.four_hosts((0, 5 * HOUR_S, 11 * HOUR_S, 30 * HOUR_S)))
        yield bed, Job(bed, folder, nodes, ranks, spares)


def exchange(seed: int) -> dict[str, Any]:
    """S3: a link turns slow, and later fast again."""
    from keepstep.faults import SlowLink

    drawn = random.Random(f"link {seed}")
    link, rate = drawn.choice((("node-a", "node-c"), ("node-b", "node-d"))), drawn.choice((10, 20, 40))
    with _job(4, 1) as (bed, job):
        job.until("warm standbys", job.warm)
        job.more(BEFORE + drawn.randrange(40))
        with bed.links.inject(SlowLink(*link, f"{rate}mbit")):
            slow_s = time.time()
            job.until("the exchange", lambda: job.incarnation == 1)
            job.more(AFTER)
            job.until("warm standbys", lambda: job.warm(2))
            fast_s = time.time()
        job.until("the exchange back", lambda: job.incarnation == 2)
        job.more(AFTER)
        codes = job.end()
        found = _judged(job, slow_s)
        marks = found.pop("begun")
        found |= {"link": link, "rate_mbit": rate, "codes": codes}
        if len(marks) == 2:
            found["after_revert_s"] = _pace(job.rows()[marks[1] + _SETTLE :])
            found["fast_until_back_s"] = job.rows()[marks[1]].at_s - fast_s
        if set(codes.values()) != {0}:
            found["failed"] = f"exit codes {codes}"
        return found


def replacement(seed: int) -> dict[str, Any]:
    """S4: a host turns slow for good, a spare waits."""
    drawn = random.Random(f"node {seed}")
    with _job(2, 2, spares=1) as (_, job):
        job.until("warm standbys", job.warm)
        job.more(BEFORE + drawn.randrange(40))
        (job.folder / "slow-node-b").touch()
        slow_s = time.time()
        job.until("the replacement", lambda: job.incarnation == 1, "node-b")
        job.more(AFTER, "node-b")
        codes = job.end()
        found = _judged(job, slow_s)
        found.pop("begun")
        if codes != {"node-a": 0, "node-b": 1, "node-c": 0}:
            found["failed"] = f"exit codes {codes}"
        return {**found, "codes": codes}


def _judged(job: Job, slow_s: float) -> dict[str, Any]:
    """Seconds an iteration: before, during, after the first move; of each move the pause and the steps made again."""
    rows = job.rows()
    begun = [place for place in range(1, len(rows)) if rows[place].step <= rows[place - 1].step]
    begun += _gaps(rows, begun)
    begun.sort()
    pauses: list[float] = []
    again: list[int] = []
    for place in begun:
        last = rows[place - 1]
        new = next(row for row in rows[place:] if row.step > last.step)
        pauses.append(new.at_s - last.at_s)
        again.append(last.step + 1 - rows[place].step)
    during = [row for row in rows[: begun[0] if begun else len(rows)] if row.at_s > slow_s]
    after = rows[begun[0] + _SETTLE : begun[1] if len(begun) > 1 else len(rows)] if begun else []
    incidents = [
        json.loads(path.read_bytes()) for path in sorted((job.run / "incidents").glob("[0-9]*.json"))
    ]
    found: dict[str, Any] = {
        "before_s": _pace([row for row in rows if row.at_s <= slow_s][_SETTLE:]),
        "during_s": _pace(during[1:]),
        "after_s": _pace(after),
        "slow_until_moved_s": rows[begun[0]].at_s - slow_s if begun else None,
        "pauses_s": pauses,
        "made_again": again,
        "begun": begun,
        "failed": "" if begun else "nothing moved",
        "actions": [f"{one['name']}: {one['detail']}" for each in incidents for one in each["actions"]],
    }
    steps = rows[-1].step + 1
    reference = undisturbed(steps)
    wrong = [
        f"rank {rank}, step {row.step}"
        for rank in range(RANKS)
        for row in job.rows(rank)
        if row.step < steps and row.value != reference[rank][row.step]
    ]
    missed = [rank for rank in range(RANKS) if {row.step for row in job.rows(rank)} < set(range(steps))]
    if wrong or missed:
        found["failed"] = f"other values than undisturbed: {wrong[:3]}; steps missed by ranks {missed}"
    return {**found, "compared": sum(len(job.rows(rank)) for rank in range(RANKS))}


def _gaps(rows: list[Row], known: list[int]) -> list[int]:
    """Where an incarnation begins that repeats no step: its first step's own seconds leave time unexplained."""
    return [
        place
        for place in range(1, len(rows))
        if place not in known and rows[place].at_s - rows[place - 1].at_s > rows[place].seconds + 0.1
    ]


def _pace(rows: list[Row]) -> float | None:
    return statistics.mean(row.seconds for row in rows) if rows else None


_values: list[dict[int, str]] = []


def undisturbed(steps: int) -> list[dict[int, str]]:
    """By rank and step, what the same training gives on one host, without emulated computing."""
    if not _values or max(_values[0]) + 1 < steps:
        with tempfile.TemporaryDirectory(prefix="keepstep-moves-") as name:
            folder = Path(name)
            command = [
                *(sys.executable, "-m", "keepstep.cli", "run", "--run-dir", str(folder / "run")),
                *("--nproc-per-node", str(RANKS), "--mitigate", "off", str(JOB), name, str(2 * steps), "0"),
            ]
            subprocess.run(command, check=True, capture_output=True, timeout=600)
            _values[:] = [{row.step: row.value for row in read(folder, rank)} for rank in range(RANKS)]
    return _values
