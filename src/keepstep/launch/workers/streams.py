"""The workers' stdout and stderr: passed through, redirected to files, or both (tee), as torchrun does it.

A worker that is redirected writes into a file itself; a tee follows that file. So no worker ever waits for the
launcher or for whoever reads the console.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from keepstep.core.own_folders import open_file
from keepstep.launch.command.job import STDERR, STDOUT, Job
from keepstep.launch.command.placement import Place
from keepstep.launch.command.run_folder import LogFiles

TEE_INTERVAL_S = 0.1
_READ_BYTES = 1 << 16
_FILES = {STDOUT: "stdout.log", STDERR: "stderr.log"}


@dataclass(frozen=True, slots=True)
class WorkerStreams:
    """Where one worker's output goes."""

    stdout: Path | None  # a file, or /dev/null; None: the console
    stderr: Path | None  # likewise
    shown: Mapping[int, Path]  # files that are followed and shown on the console, by STDOUT or STDERR


def worker_streams(job: Job, logs: LogFiles, rank: int, local_rank: int, attempt: int) -> WorkerStreams:
    """The worker's streams as ``--redirects``, ``--tee`` and ``--local-ranks-filter`` say."""
    wanted = job.streams
    hidden = wanted.shown is not None and local_rank not in wanted.shown
    targets: dict[int, Path | None] = {}
    followed: dict[int, Path] = {}
    for stream, name in _FILES.items():
        tee = bool(wanted.tees[local_rank] & stream)
        if tee or wanted.redirects[local_rank] & stream:
            targets[stream] = logs.of(rank, local_rank, attempt) / name
        else:
            targets[stream] = Path(os.devnull) if hidden else None
        target = targets[stream]
        if tee and target:
            followed[stream] = target
    return WorkerStreams(targets[STDOUT], targets[STDERR], {} if hidden else followed)


def sizes(streams: Iterable[WorkerStreams]) -> dict[Path, int]:
    """The sizes of the files among them, as far as they are there."""
    paths = {path for one in streams for path in (one.stdout, one.stderr) if path is not None}
    return {path: path.stat().st_size for path in paths if path.exists()}


def open_for_worker(path: Path | None) -> int | None:
    """A descriptor for a worker that appends to the file, so that earlier attempts' lines stay; None: no file."""
    if path is None:
        return None
    if path == Path(os.devnull):
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    return open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def line_prefix(job: Job, rank: int, local_rank: int) -> bytes:
    """What stands before a worker's lines on the console: ``[role0]:``, or the user's template filled in."""
    if job.streams.prefix is None:
        return f"[{job.role}{local_rank}]:".encode()
    filled = Template(job.streams.prefix).safe_substitute(
        role_name=job.role, rank=rank, local_rank=local_rank
    )
    return filled.encode()


class Follower:
    """Follows growing files and writes their lines, prefixed, to a descriptor or a file.

    With ``words`` only lines that contain one of them are written.
    """

    def __init__(self, target: int, words: Sequence[str] = ()) -> None:
        self._target = target
        self._words = [word.encode() for word in words]
        self._sources: list[_Source] = []

    def follow(self, path: Path, prefix: bytes) -> None:
        """Add a file, which need not be there yet; only what is written from now on counts."""
        self._sources.append(_Source(path, prefix, path.stat().st_size if path.exists() else 0))

    @property
    def busy(self) -> bool:
        """Whether it follows any file."""
        return bool(self._sources)

    def pump(self, *, last: bool = False) -> None:
        """Write the lines that are there; those that the target cannot take now stay in the files.

        ``last``: also write a line without its end, and wait for a target that takes data slowly.
        """
        for source in self._sources:
            while source.read(last, self._keep):
                if not self._write(source, wait=last):
                    break
            if source.pending and not self._write(source, wait=last):
                return
        if last:
            for source in self._sources:
                source.close()
            self._sources = []

    def _keep(self, line: bytes) -> bool:
        return not self._words or any(word in line for word in self._words)

    def _write(self, source: _Source, *, wait: bool) -> bool:
        """Write what a source has ready; False when the target would block, or is closed, which drops the lines."""
        waiter = select.poll()
        waiter.register(self._target, select.POLLOUT)
        while source.pending:
            events = waiter.poll(5000 if wait else 0)
            if not events:
                return False
            try:
                # A pipe that is ready takes PIPE_BUF bytes without blocking; a regular file takes anything.
                written = os.write(self._target, source.pending[: select.PIPE_BUF])
            except OSError:
                source.pending = b""
                return False
            source.pending = source.pending[written:]
        return True


class Following:
    """Shows an incarnation's output on the console and filters it into files, until it is stopped."""

    def __init__(self, job: Job, logs: LogFiles) -> None:
        self._job = job
        self._logs = logs
        self._followers: list[Follower] = []
        self._files: list[int] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self, streams: Mapping[int, WorkerStreams], place: Place) -> None:
        """Follow what the workers write from now on. ``streams`` are by local rank."""
        wanted = self._job.streams
        targets = {STDOUT: (1, wanted.stdout_words, "stdout"), STDERR: (2, wanted.stderr_words, "stderr")}
        for stream, (descriptor, words, name) in targets.items():
            followers = [Follower(descriptor)]
            if words:
                path = self._logs.attempt(place.incarnation) / f"filtered_{name}.log"
                self._files.append(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
                followers.append(Follower(self._files[-1], words))
            for local_rank, of_worker in streams.items():
                prefix = line_prefix(self._job, place.first_rank + local_rank, local_rank)
                for follower in followers:
                    if stream in of_worker.shown:
                        follower.follow(of_worker.shown[stream], prefix)
            self._followers += [follower for follower in followers if follower.busy]
        if self._followers:
            self._pump()

    def _pump(self) -> None:
        for follower in self._followers:
            follower.pump()
        self._timer = asyncio.get_running_loop().call_later(TEE_INTERVAL_S, self._pump)

    def stop(self) -> None:
        """Write what is left, and follow nothing any more."""
        if self._timer:
            self._timer.cancel()
        for follower in self._followers:
            follower.pump(last=True)
        self._followers = []
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []


class _Source:
    """A followed file; ``pending`` holds its lines that are ready to be written."""

    __slots__ = ("_fd", "_offset", "_partial", "_path", "_prefix", "pending")

    def __init__(self, path: Path, prefix: bytes, offset: int) -> None:
        self._path = path
        self._prefix = prefix
        self._offset = offset
        self._fd = -1
        self._partial = b""
        self.pending = b""

    def read(self, last: bool, keep: Callable[[bytes], bool]) -> bool:
        """Read on, unless lines still wait to be written; returns whether there are lines to write."""
        if self.pending:
            return True
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return False
        more = True
        while more and not self.pending:
            data = os.pread(self._fd, _READ_BYTES, self._offset)
            more = bool(data)
            self._offset += len(data)
            *lines, self._partial = (self._partial + data).split(b"\n")
            if self._partial and (len(self._partial) > _READ_BYTES or (last and not data)):
                lines.append(self._partial)
                self._partial = b""
            self.pending = b"".join(self._prefix + line + b"\n" for line in lines if keep(line))
        return bool(self.pending)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
