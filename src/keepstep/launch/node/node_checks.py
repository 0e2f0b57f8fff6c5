"""The launcher's checks of its node: before the first start, where an unfit node is an error; and after a failure.

Each runs in a thread of its own and is given up after a while: a file system that hangs must not hang the launcher.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version_tuple

from keepstep import __version__
from keepstep.core.errors import RunError
from keepstep.detect.error_kind import speaks_of_hardware
from keepstep.launch.command.job import Job
from keepstep.launch.local_run import LocalRun
from keepstep.launch.node.checks import (
    Found,
    Subject,
    installed,
    kernel_log,
    nics,
    paths,
    resources,
    why_tables,
)

_CHECKS: Mapping[str, Callable[[Subject], Iterable[Found]]] = {
    "disk": resources.disk,
    "shared_memory": resources.shared_memory,
    "memory": resources.memory,
    "ports": resources.ports,
    "kernel_log": kernel_log.look,
    "why_tables": why_tables.look,
    "network": nics.network,
    "paths": paths.paths,
}
# Software of which other versions are told, and are no error.
_NEED_NOT_FIT = ("driver", "CUDA", "NCCL")
_PATIENCE_S = 2.0
_HARDWARE_S = 0.5
_LASTED_S = 600.0  # workers that ran for so long ended of something new
_LATELY_S = 3600.0  # errors that the kernel told of within this time before the start count


def versions(job: Job) -> tuple[str, ...]:
    """Versions that have to be the same on all nodes; torch's only where workers run this Python."""
    found = [f"keepstep {__version__}", f"Python {'.'.join(python_version_tuple()[:2])}"]
    with suppress(PackageNotFoundError):
        found += [] if job.entry == "program" else [f"torch {version('torch')}"]
    return tuple(found)


def alike(job: Job) -> tuple[str, ...]:
    """Versions that should be the same on all nodes; the driver's only, where workers need not run this Python."""
    wanted = _NEED_NOT_FIT[:1] if job.entry == "program" else _NEED_NOT_FIT
    return tuple(f"{name} {text}" for name, text in installed.versions() if name in wanted)


def run(
    subject: Subject,
    checks: Mapping[str, Callable[[Subject], Iterable[Found]]] = _CHECKS,
    *,
    patience_s: float = _PATIENCE_S,
) -> tuple[Found, ...]:
    """Run the checks side by side, for ``patience_s`` at most; returns what they found, in their order."""
    answers: queue.SimpleQueue[tuple[str, list[Found]]] = queue.SimpleQueue()

    def look(name: str) -> None:
        try:
            answers.put((name, list(checks[name](subject))))
        except Exception as error:  # a check with a bug says nothing about the node
            text = f"node {subject.node}: check {name} failed: {type(error).__name__}: {error}"
            answers.put((name, [Found(text)]))

    for name in checks:
        threading.Thread(target=look, args=(name,), name=f"keepstep-check-{name}", daemon=True).start()
    late = f"has not answered within {patience_s:g} s"
    found = {name: [Found(f"node {subject.node}: check {name} {late}")] for name in checks}
    until_s = time.monotonic() + patience_s
    with suppress(queue.Empty):
        for _ in checks:
            name, lines = answers.get(timeout=max(until_s - time.monotonic(), 0.001))
            found[name] = lines
    return tuple(one for lines in found.values() for one in lines)


class NodeChecks:
    """Runs the checks, unless they are switched off (``--no-check``)."""

    def __init__(self, run: LocalRun) -> None:
        self._run, self._job, self._warn = run, run.job, run.warn
        storage = self._job.persisting.where if self._job.persisting else ""
        self._folders = (run.folder, Path(storage)) if storage and "://" not in storage else (run.folder,)
        self._began_s = 0.0  # when this incarnation began; CLOCK_MONOTONIC
        self._running: asyncio.Future[tuple[Found, ...]] | None = None
        self._noted: list[Found] = []  # what the launcher has found itself since this incarnation began
        self._earlier: list[
            Found
        ] = []  # broken hardware that was found in incarnations right before this one
        self.found: tuple[str, ...] = ()  # lines about what was found before the start

    def before_start(self) -> None:
        """Check the node, and warn of what is found. Raises RunError where that makes the node unfit."""
        if not self._job.check:
            return
        job = self._job
        port = job.master_port if job.rendezvous.endpoint is None else 0
        since_s = time.monotonic() - _LATELY_S
        log = job.kernel_log
        # Whether checkpoints can be written at all is what the check of the disk says.
        where = job.persisting.where if job.persisting else ""
        wanted = paths.configured_paths(where, job.dataset_paths, "any")
        fresh = Subject(job.node, job.nproc, self._folders, port, since_s, True, log, wanted)
        found = run(fresh)
        unfit = [one.text for one in found if one.unfit]
        if unfit:
            raise RunError(f"{'; and '.join(unfit)} (--no-check starts it anyway)")
        self.found = tuple(one.text for one in found)
        for text in self.found:
            self._warn(text)

    def began(self) -> None:
        """Note that workers have been started, so that older errors do not count, unless these end soon, too."""
        self._earlier = [one for one in (*self._results, *self._still_broken) if one.broken]
        self._began_s, self._running, self._noted = time.monotonic(), None, []

    def failed(self) -> None:
        """Begin to check the node in the background, because a worker has failed."""
        if self._job.check and self._running is None:
            job, log = self._job, self._job.kernel_log
            subject = Subject(self._run.job.node, job.nproc, self._folders, 0, self._began_s, kernel_log=log)
            self._running = asyncio.get_running_loop().run_in_executor(None, run, subject)

    def note(self, found: Found) -> None:
        """Warn of something that the launcher has found at the end of its workers; it counts as if a check had."""
        self._warn(found.text)
        if self._job.check:
            self._noted.append(found)

    async def about(self, error: str) -> None:
        """Wait for the check, half a second at most, where a rank's error is about hardware; else not at all."""
        if self._running is not None and speaks_of_hardware(error):
            await asyncio.wait([self._running], timeout=_HARDWARE_S)

    def unfit(self) -> str:
        """Why workers should not begin again on this node, as far as the checks have found out by now."""
        for one in self._results:
            self._warn(one.text)
        found = (*self._results, *self._noted, *self._still_broken)
        return "; ".join(dict.fromkeys(one.text for one in found if one.unfit))

    @property
    def kernel_told(self) -> tuple[tuple[str, float], ...]:
        """Lines in which the kernel has told of broken hardware since the workers began, with their Unix times."""
        ago_s = time.time() - time.monotonic()
        return tuple((one.told, one.told_s + ago_s) for one in self._results if one.told)

    @property
    def is_broken(self) -> bool:
        """Whether the kernel has told of broken hardware since the workers began, or right before that."""
        return any(one.broken for one in (*self._results, *self._still_broken))

    @property
    def _still_broken(self) -> list[Found]:
        """Broken hardware of before, where workers did not last on it: a restart has mended nothing."""
        return self._earlier if time.monotonic() - self._began_s < _LASTED_S else []

    @property
    def _results(self) -> tuple[Found, ...]:
        running = self._running
        is_done = running is not None and running.done() and running.exception() is None
        return running.result() if running is not None and is_done else ()
