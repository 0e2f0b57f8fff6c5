"""The launcher's checks of its node: before the first start, where an unfit node is an error; and after a failure."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version_tuple

from keepstep import __version__
from keepstep.core.errors import RunError
from keepstep.launch.command.job import Job
from keepstep.launch.local_run import LocalRun
from keepstep.launch.node import checks

_LATELY_S = 3600.0  # errors that the kernel told of within this time before the start count


def versions(job: Job) -> tuple[str, ...]:
    """Versions that have to be the same on all nodes; torch's only where workers run this Python."""
    found = [f"keepstep {__version__}", f"Python {'.'.join(python_version_tuple()[:2])}"]
    with suppress(PackageNotFoundError):
        found += [] if job.entry == "program" else [f"torch {version('torch')}"]
    return tuple(found)


class NodeChecks:
    """Runs the checks, unless they are switched off (``--no-check``).

    Attributes:
        found: lines about what was found before the start.
    """

    def __init__(self, run: LocalRun) -> None:
        self._job, self._warn = run.job, run.warn
        storage = self._job.persisting.where if self._job.persisting else ""
        self._folders = (run.folder, Path(storage)) if storage and "://" not in storage else (run.folder,)
        self._began_s = 0.0  # when this incarnation began; CLOCK_MONOTONIC
        self._running: asyncio.Future[tuple[checks.Found, ...]] | None = None
        self.found: tuple[str, ...] = ()

    def before_start(self) -> None:
        """Check the node, and warn of what is found. Raises RunError where that makes the node unfit."""
        if not self._job.check:
            return
        job = self._job
        port = job.master_port if job.rendezvous.endpoint is None else 0
        since_s = time.monotonic() - _LATELY_S
        found = checks.run(checks.Subject(job.node, job.nproc, self._folders, port, since_s, fresh=True))
        unfit = [one.text for one in found if one.unfit]
        if unfit:
            raise RunError(f"{'; and '.join(unfit)} (--no-check starts it anyway)")
        self.found = tuple(one.text for one in found)
        for text in self.found:
            self._warn(text)

    def began(self) -> None:
        """Note that workers have been started, so that older errors do not count."""
        self._began_s, self._running = time.monotonic(), None

    def failed(self) -> None:
        """Begin to check the node in the background, because a worker has failed."""
        if self._job.check and self._running is None:
            subject = checks.Subject(self._job.node, self._job.nproc, self._folders, 0, self._began_s)
            self._running = asyncio.get_running_loop().run_in_executor(None, checks.run, subject)

    def unfit(self) -> str:
        """Why workers should not begin again on this node, as far as the checks have found out by now."""
        running = self._running
        if running is None or not running.done() or running.exception() is not None:
            return ""
        for one in running.result():
            self._warn(one.text)
        return "; ".join(one.text for one in running.result() if one.unfit)
