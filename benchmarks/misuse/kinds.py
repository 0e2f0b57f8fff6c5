"""The kinds of misuse: for each what is run, drawn by seed, and what has to come of it."""

from __future__ import annotations

import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.checkpoint_faults.campaign import whole_steps
from benchmarks.misuse.job import Orders
from benchmarks.misuse.running import Ended, Job, Started, run

STEPS = 12
WAYS = ("load", "session", "save", "group", "no-watch", "nodes")
"""How a script saves: see `Orders.way`; without agent and controller; on two nodes."""

_RESTARTS = ("--max-restarts", "1")
_EVERY = 5  # does not divide STEPS
_BRIEF_WAIT = {"KEEPSTEP_CHECKPOINT_WAIT_S": "6"}  # at the end of a run, for storage that does not come back


@dataclass
class Played:
    """What came of a trial.

    Attributes:
        jobs: the jobs that were run, in order.
        ended: how they ended.
        expected: exit code of each.
        whole: whether each is to end with losses for all steps.
        stored: steps whole on storage at the end.
        last: step that must be there; 0: none.
        free: what is wrong besides, a line each.
    """

    jobs: list[Job] = field(default_factory=list[Job])
    ended: list[Ended] = field(default_factory=list[Ended])
    expected: list[int] = field(default_factory=list[int])
    whole: list[bool] = field(default_factory=list[bool])
    stored: list[int] = field(default_factory=list[int])
    last: int = 0
    wrong: list[str] = field(default_factory=list[str])

    def add(self, job: Job, ended: Ended, expected: int = 0, *, whole: bool | None = None) -> None:
        """A job has ended."""
        self.jobs.append(job)
        self.ended.append(ended)
        self.expected.append(expected)
        self.whole.append(expected == 0 if whole is None else whole)


@dataclass(frozen=True)
class Kind:
    """One kind of misuse.

    Attributes:
        play: runs it in a folder, given a job that misuses nothing and chances.
        says: what its one line contains, as a regular expression.
        ways: of saving in which it is possible.
        root: whether it needs root, to mount a file system.
    """

    play: Callable[[Job, Path, random.Random], Played]
    says: str
    ways: tuple[str, ...] = WAYS
    root: bool = False


def plain(way: str, folder: Path, seed: int, ranks: int) -> Job:
    """A job that misuses nothing, in one of the `WAYS`."""
    orders = Orders(str(folder / "out"), STEPS, seed, way if way in ("session", "save", "group") else "load")
    flags = ("--no-watch",) if way == "no-watch" else ()
    return Job(orders, ranks, flags, nodes=2 if way == "nodes" else 1)


def _with(job: Job, *flags: str, **orders: object) -> Job:
    return replace(job, flags=(*job.flags, *flags), orders=replace(job.orders, **orders))  # type: ignore[arg-type]


def _killed(job: Job, chances: random.Random) -> Job:
    """A rank is killed in the middle, and the job begins again; not over nodes, where that takes a spare's patience."""
    if job.nodes > 1:
        return job
    return _with(job, *_RESTARTS, kill=chances.randrange(job.ranks), at=chances.randint(5, 8))


def _one_rank(job: Job, folder: Path, chances: random.Random) -> Played:
    job = _killed(_with(job, savers=(chances.randrange(job.ranks),)), chances)
    played = Played()
    played.add(job, run(job, folder, "run"))
    return played


def _off_by_one(job: Job, folder: Path, chances: random.Random) -> Played:
    job = _killed(_with(job, ahead=chances.randrange(job.ranks)), chances)
    played = Played()
    played.add(job, run(job, folder, "run"))
    return played


def _stored(job: Job, folder: Path, *flags: str) -> Job:
    """With a storage that a later run goes on from."""
    return _with(job, "--checkpoint-dir", str(folder / "storage"), "--checkpoint-every", str(_EVERY), *flags)


def _then(change: Callable[[Job], Job]) -> Callable[[Job, Path, random.Random], Played]:
    """A run that ends well, and one that goes on from its storage with something changed."""

    def play(job: Job, folder: Path, chances: random.Random) -> Played:
        first = _stored(job, folder)
        second = change(_with(first, folder=str(folder / "out-2"), steps=STEPS + 3))
        played = Played(last=STEPS)
        played.add(first, run(first, folder, "run"))
        played.add(second, run(second, folder, "run-2"), 1)
        played.stored = whole_steps(folder / "storage")
        return played

    return play


def _small_limit(job: Job, folder: Path, chances: random.Random) -> Played:
    """Too small from the first save on, or only once the state has grown; also by one rank's share."""
    which = chances.choice(("nothing fits", "one rank fits", "it grows"))
    if which == "it grows":
        job = _with(job, grow=chances.randint(4, 6), grow_bytes=8 << 20)
        limit = 4 << 20
    else:
        limit = 50_000 if which == "nothing fits" else 250_000
    job = replace(job, environment={"KEEPSTEP_CHECKPOINT_BYTES": str(limit)})
    played = Played()
    played.add(job, run(job, folder, "run"))
    return played


@contextmanager
def _mounted(folder: Path, nbytes: int) -> Iterator[None]:
    """A file system of its own, of a size. Needs root."""
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "keepstep-misuse", str(folder)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _disk_full(job: Job, folder: Path, chances: random.Random) -> Played:
    """From the first step on."""
    job = replace(_stored(job, folder), environment=_BRIEF_WAIT)
    played = Played()
    with _mounted(folder / "storage", 4096 * chances.randint(2, 5)):
        played.add(job, run(job, folder, "run"))
    return played


def _not_writable(job: Job, folder: Path, chances: random.Random) -> Played:
    """It can be written to when the run begins (else the run is refused), and not any more when steps come.

    A file takes its place: root may write to any folder, and one with a locked file cannot be mounted read-only.
    """
    storage = folder / "storage"
    job = replace(_stored(job, folder), environment=_BRIEF_WAIT)
    played = Played()
    started = Started(job, folder, "run")
    _until(started, "snapshots of rank 0 take")  # what is there was looked at
    storage.rename(folder / "gone")
    storage.write_text("")
    played.add(job, started.finish())
    return played


def _killed_in_the_last_save(job: Job, folder: Path, chances: random.Random) -> Played:
    after_s = 10 ** chances.uniform(-5, -2.5)
    job = _stored(job, folder, *_RESTARTS)
    job = _with(job, kill=chances.randrange(job.ranks), at=STEPS - 1, within_s=after_s)
    played = Played(last=STEPS)
    played.add(job, run(job, folder, "run"))
    played.stored = whole_steps(folder / "storage")
    return played


def _two_runs(job: Job, folder: Path, chances: random.Random) -> Played:
    first = _stored(job, folder)
    first = _with(first, step_s=0.5)
    second = _with(first, folder=str(folder / "out-2"))
    played = Played(last=STEPS)
    started = Started(first, folder, "run")
    _until(started, "watched|run folder")
    refused = run(second, folder, "run-2")
    played.add(first, started.finish())
    played.add(second, refused, 2)
    played.stored = whole_steps(folder / "storage")
    return played


def _until(started: Started, words: str) -> None:
    """Wait until the job has said these words, a minute at most."""
    deadline_s = time.monotonic() + 60
    while not re.search(words, started.said()) and time.monotonic() < deadline_s:
        time.sleep(0.05)


_ONE_NODE = ("load", "session", "save", "group", "no-watch")
_LOADING = ("load", "session", "group")

KINDS: dict[str, Kind] = {
    "one rank only": Kind(_one_rank, r"never saved: call save\(\) on all ranks"),
    "steps off by one": Kind(_off_by_one, "same step on all ranks"),
    "other shapes": Kind(_then(lambda job: _with(job, width=96)), "the snapshot has float32 of", _LOADING),
    "other dtypes": Kind(
        _then(lambda job: _with(job, dtype="float64")), "the snapshot has float32 of", _LOADING
    ),
    "other world size": Kind(_then(lambda job: replace(job, ranks=job.ranks + 1)), "this job has", _LOADING),
    "limit too small": Kind(_small_limit, "KEEPSTEP_CHECKPOINT_BYTES"),
    "disk full": Kind(_disk_full, "No space left on device", _LOADING, root=True),
    "folder not writable": Kind(_not_writable, "Not a directory", _LOADING),
    "killed in the last save": Kind(_killed_in_the_last_save, "", _LOADING),
    "two runs in one folder": Kind(_two_runs, "is in use by the run", _LOADING),
}
