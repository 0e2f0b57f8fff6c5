"""This node's share of a run: what all parts of its launcher work with, and what they tell the operator."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from keepstep import __version__
from keepstep.core.exit_codes import CLASSES, Category, TemporaryKind
from keepstep.core.log_lines import one_line
from keepstep.core.process_mark import process_mark
from keepstep.launch.command import run_folder
from keepstep.launch.command.job import Job
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import Place
from keepstep.launch.schedulers.slurm import OWN_NODES
from keepstep.launch.workers.processes import Processes

_GONE = (errno.EIO, errno.EPIPE, errno.EBADF)


class LocalRun:
    """The job, its run folder, the file with its secret, and the launcher's children."""

    def __init__(self, job: Job, folder: Path, secret: Path, processes: Processes) -> None:
        self.job, self.folder, self.secret, self.processes = job, folder, secret, processes
        self._started_unix_s = time.time()

    def rename(self, node: str) -> None:
        """Go on under the name by which the job knows this node."""
        if node != self.job.node:
            self.job = replace(self.job, node=node)

    def warn(self, text: str) -> None:
        """Print a line on stderr, also with ``--quiet``."""
        self.show(f"keepstep: {one_line(text)}")

    def show(self, text: str) -> None:
        """Print on stderr. That nobody reads there any more, as of a terminal that was closed, stops nothing."""
        try:
            print(text, file=sys.stderr, flush=True)
        except OSError as error:
            if error.errno in _GONE:  # else what is left in its buffer would make the exit code 120
                sys.stderr = open(os.devnull, "w")  # noqa: SIM115

    def say(self, text: str) -> None:
        """Print a line on stderr, but not with ``--quiet``."""
        if not self.job.quiet:
            self.warn(text)

    def note(self, text: str) -> None:
        """Print a line on stderr, but only with ``--verbose``."""
        if self.job.verbose:
            self.say(text)

    def describe(
        self, place: Place | None, controller: Endpoint | None, term: int, rings: Mapping[int, str]
    ) -> None:
        """Write ``run.json``, by which others find the run.

        ``place``: this node's. ``controller``: where it can be met. ``term``: of the controller, where it may move to
        another node; else 0. ``rings``: paths by rank.
        """
        job = self.job
        described = {
            "id": self.folder.name,
            "run_id": job.run_id.encode("utf-8", "backslashreplace").decode(),
            "argv": [job.script, *job.arguments],
            "script": job.script,
            "nodes": place.node_count if place else job.max_nodes,
            "nproc": job.nproc,
            "world_size": place.world_size if place else None,
            **({"layout": job.layout} if job.layout else {}),
            "started_unix_s": self._started_unix_s,
            "version": __version__,
            "controller": str(controller) if controller else None,
            "host": os.uname().nodename,
            "launcher": process_mark(os.getpid()),
            "secret_file": str(self.secret),
            **({"term": term} if term else {}),
            # Who tells the scheduler of a drained node.
            **({"drains": "keepstep slurm"} if os.environ.get(OWN_NODES) else {}),
            "rings": {str(rank): path for rank, path in rings.items()},
        }
        self._write("run.json", described)

    def ended(self, exit_code: int, reason: str, category: Category, kind: TemporaryKind = "") -> None:
        """Write ``end.json``: how the run ended. ``kind``: where it ended with `TEMPORARY_FAILURE`."""
        from keepstep.report.ended_run import newest_verdict  # here, because it loads msgspec

        cause = {"cause": {"class": CLASSES[kind], "kind": kind}} if kind else {}
        number, nodes = newest_verdict(self.folder) if exit_code else ("", [])
        ended = {
            "exit_code": exit_code,
            "category": category,
            "reason": reason,
            "nodes": nodes,
            "incident": number,
            "ended_unix_s": time.time(),
            **cause,
        }
        self._write("end.json", ended)

    def _write(self, name: str, content: Mapping[str, object]) -> None:
        try:
            run_folder.write_json(self.folder / name, content)
        except OSError as error:
            self.warn(f"{self.folder / name}: cannot be written: {error.strerror}")
