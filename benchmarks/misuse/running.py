"""Runs the jobs of a trial as a user would, and gathers what came of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.checkpoint_faults.campaign import ROOT, wait_for_the_end
from benchmarks.misuse.job import Orders

JOB = Path(__file__).with_name("job.py")
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Job:
    """One job of a trial: what its ranks do, and how it is started.

    Attributes:
        orders: given to every rank.
        ranks: how many there are.
        flags: of ``keepstep run``.
        environment: added to that of this process.
        nodes: launchers that share the ranks; each is a node of its own.
        launcher: "keepstep", or "torchrun".
    """

    orders: Orders
    ranks: int = 2
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    nodes: int = 1
    launcher: str = "keepstep"


@dataclass
class Ended:
    """What became of a job: the exit code of each launcher, and all that they said."""

    codes: list[int]
    said: str


class Started:
    """A job that runs. ``name``: of its run folder and console below the trial's folder."""

    def __init__(self, job: Job, folder: Path, name: str) -> None:
        self._job, self._run = job, folder / name
        Path(job.orders.folder).mkdir(exist_ok=True)
        orders = folder / f"{name}.json"
        orders.write_text(json.dumps(asdict(job.orders)))
        self._consoles = [folder / f"{name}-{node}.txt" for node in range(job.nodes)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **job.environment}
        port = _free_port()
        self._launchers: list[subprocess.Popen[bytes]] = []
        with ExitStack() as stack:
            for node, path in enumerate(self._consoles):
                console = stack.enter_context(path.open("wb"))
                command = self._command(node, port)
                self._launchers.append(
                    subprocess.Popen(
                        [*command, str(JOB), str(orders)],
                        cwd=folder,
                        env={**environment, "KEEPSTEP_NODE_NAME": f"node-{node}"},
                        stdin=subprocess.DEVNULL,
                        stdout=console,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def _command(self, node: int, port: int) -> list[str]:
        job = self._job
        share = ["--nproc-per-node", str(job.ranks // job.nodes)]
        if job.launcher == "torchrun":
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", *share]
        command = [sys.executable, "-m", "keepstep.cli", "run", "--no-check", *share, *job.flags]
        command += ["--run-dir", str(self._run)]
        if job.nodes > 1:
            command += ["--nnodes", str(job.nodes), "--rdzv-backend", "c10d", "--no-validate"]
            command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", f"is_host={int(node == 0)}"]
        return command

    def finish(self) -> Ended:
        """Wait for the end. Raises TimeoutError when it does not come."""
        until_s = time.monotonic() + _PATIENCE_S
        try:
            for launcher in self._launchers:
                launcher.wait(max(0.1, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the job is not over after {_PATIENCE_S:g} s: {self.said()[-600:]}") from None
        finally:
            for launcher in self._launchers:
                if launcher.poll() is None:
                    os.killpg(launcher.pid, signal.SIGKILL)
                    launcher.wait()
            wait_for_the_end(self._run)
        return Ended([launcher.returncode for launcher in self._launchers], self.said())

    def said(self) -> str:
        """What its launchers and ranks have said so far."""
        return "".join(path.read_text(errors="replace") for path in self._consoles)


def run(job: Job, folder: Path, name: str) -> Ended:
    """Run a job to its end."""
    return Started(job, folder, name).finish()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
