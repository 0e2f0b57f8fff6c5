"""When a launcher checks its node: before the first start, where an unfit node is an error; and after a failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version_tuple

from keepstep import __version__
from keepstep.core.errors import RunError
from keepstep.launch.command.job import Job
from keepstep.launch.node import checks

_LATELY_S = 3600.0  # of what the kernel told before the start


def versions(job: Job) -> tuple[str, ...]:
    """What all nodes have to have alike; torch only where workers run this Python."""
    found = [f"keepstep {__version__}", f"Python {'.'.join(python_version_tuple()[:2])}"]
    with suppress(PackageNotFoundError):
        found += [] if job.entry == "program" else [f"torch {version('torch')}"]
    return tuple(found)


class NodeChecks:
    """``warn``: a line for the operator. Switched off (``--no-check``) it finds nothing."""

    def __init__(self, job: Job, folder: Path, warn: Callable[[str], None]) -> None:
        self._job, self._warn = job, warn
        storage = job.persisting.where if job.persisting and "://" not in job.persisting.where else ""
        self._folders = (folder, Path(storage)) if storage else (folder,)
        self._began_s = 0.0  # of this incarnation
        self._running: asyncio.Future[tuple[checks.Found, ...]] | None = None
        self.found: tuple[str, ...] = ()  # before the start

    def before_start(self) -> None:
        """Raises RunError when this node is unfit; warns of the rest."""
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
        """Workers have been started."""
        self._began_s, self._running = time.monotonic(), None

    def failed(self) -> None:
        """One has failed: begin to look, beside everything else."""
        if self._job.check and self._running is None:
            subject = checks.Subject(self._job.node, self._job.nproc, self._folders, 0, self._began_s)
            self._running = asyncio.get_running_loop().run_in_executor(None, checks.run, subject)

    def unfit(self) -> str:
        """Why workers should not begin again on this node, as far as it is known by now; nobody waits for it."""
        running = self._running
        if running is None or not running.done() or running.exception() is not None:
            return ""
        for one in running.result():
            self._warn(one.text)
        return "; ".join(one.text for one in running.result() if one.unfit)
