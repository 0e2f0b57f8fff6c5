"""A job within an allocation of Slurm: one job step with one launcher on each node, and the job's own exit code.

One step for all nodes does not do: Slurm ends it with the exit code of a launcher that was lost, also where the job
went on without that one and finished.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from keepstep.core.errors import UsageError
from keepstep.core.exit_codes import STOPPED_BY_HAND, TEMPORARY_FAILURE, UNUSABLE
from keepstep.launch.schedulers.local import number_in
from keepstep.launch.schedulers.slurm import MOST_GPUS, OWN_NODES, job_of, nodes_in
from keepstep.launch.signals import END_TIME
from keepstep.launch.slurm_orders import SlurmOrders, output_of
from keepstep.report.ended_run import End, end_of

_MOST_CPUS = 1 << 16
"""Most CPUs of one node."""
_LAST_WORDS_S = 10.0  # between the end of one launcher and that of the job, which may be the cause
_LEFT_S = 30.0  # how long steps may outlive the job, as those on a lost node do
_ENDED = frozenset({0, UNUSABLE, TEMPORARY_FAILURE, STOPPED_BY_HAND})
_OF_ALL_STEPS = frozenset({"SLURM_GPUS", "SLURM_NTASKS_PER_GPU"})
"""What srun would take from its environment, and what one node alone cannot have."""
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGNALLED = 128  # exit codes from here on mean that a signal ended the launcher, as a shell has it


class SlurmSteps:
    """The steps of one job; `run` starts them and returns its exit code."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        restarts: int,
        environ: Mapping[str, str],
        orders: SlurmOrders,
        say: Callable[[str], None],
        srun_flags: Sequence[str] = (),
    ) -> None:
        """
        Args:
            command: of each node's launcher.
            folder: the run's folder, whose ``end.json`` has the job's exit code.
            restarts: how often a launcher that was killed is started again on its node.
            environ: of this process, in the allocation.
            orders: looks after bad nodes while the job runs.
            say: tells the user one line.
            srun_flags: the user's, for each step.

        Raises UsageError where Slurm's variables do not list the nodes, or these have unlike numbers of GPUs.
        """
        self._nodes = nodes_in(environ, "SLURM_JOB_NODELIST")
        self._command, self._folder, self._restarts, self._say = tuple(command), folder, restarts, say
        self._job, self._srun_flags = job_of(environ), tuple(srun_flags)
        kept = {name: value for name, value in environ.items() if name not in _OF_ALL_STEPS}
        self._shares_gpus = "SLURM_GPUS" in environ and "SLURM_GPUS_PER_NODE" not in environ
        if self._shares_gpus:
            _check_shares(environ, len(self._nodes))
        self._environ = {**kept, OWN_NODES: environ["SLURM_JOB_NODELIST"]}
        self._earlier = end_of(folder)
        self._step_name = f"keepstep-{time.time_ns()}-{os.getpid()}"  # no other run's in the job
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._codes: dict[str, int] = {}
        self._runs = 0  # how often the first node's launcher was started, which begins a run
        self.orders = orders
        self._asked: signal.Signals | None = None
        self._asking: asyncio.Task[None] | None = None

    @property
    def commands(self) -> list[list[str]]:
        """The command of each node's step."""
        return [self.command(node) for node in self._nodes]

    def command(self, node: str) -> list[str]:
        """The command of the step that starts the launcher of one node, with all that the job has there."""
        cpus = number_in(self._environ, "SLURM_CPUS_PER_TASK", _MOST_CPUS)
        gpus = number_in(self._environ, "SLURM_GPUS_ON_NODE", MOST_GPUS) if self._shares_gpus else None
        return [
            *("srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={node}"),
            *(f"--job-name={self._step_name}", "--overlap", "--kill-on-bad-exit=0"),
            *("--cpu-bind=none", "--input=none", "--mpi=none"),
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            *([f"--gpus-per-node={gpus}"] if gpus else []),
            *self._srun_flags,
            *self._command,
        ]

    async def run(self) -> int:
        """Start a launcher on every node and wait until the job has ended. Raises UsageError where there is no srun."""
        await self._learn_end()
        loop = asyncio.get_running_loop()
        for number in _ASKED:
            loop.add_signal_handler(number, self._pass_on, number)
        steps = [loop.create_task(self._keep(node)) for node in self._nodes]
        ending = loop.create_task(self._end_what_is_left(steps))
        watching = loop.create_task(self.orders.watch(lambda: all(one.done() for one in steps)))
        await asyncio.gather(*steps)
        ending.cancel()
        await asyncio.wait([watching])  # what it raises does not change the job's exit code
        if (end := self._end()) is not None:
            await self.orders.tell_end(end)
        return self._exit_code()

    async def _learn_end(self) -> None:
        """Have the launchers know when the job's time is over, which an older Slurm does not say in its variables."""
        if END_TIME not in self._environ:
            told = await output_of("squeue", "--noheader", f"--jobs={self._job}", "--format=%e")
            with suppress(ValueError):
                self._environ[END_TIME] = f"{datetime.fromisoformat(told.strip()).timestamp():.0f}"

    async def _keep(self, node: str) -> None:
        """Run the launcher of one node; again where it alone was killed, or the first one has begun a new run."""
        for left in reversed(range(self._restarts + 1)):
            runs = self._runs
            code = await self._step(node)
            self._codes[node] = code
            is_left_behind = code == TEMPORARY_FAILURE and runs < self._runs
            is_killed = code not in _ENDED and code >= _SIGNALLED
            if not left or not (is_left_behind or is_killed):
                break
            if is_killed:
                await asyncio.sleep(_LAST_WORDS_S)
            is_over = self._asked or not self._running or self._end_code() is not None
            if is_over or node in self.orders.bad:
                break
            self._say(
                f"the launcher of {node} ended with exit code {code} and the job goes on: it is started again"
            )
        self.orders.left.add(node)

    async def _step(self, node: str) -> int:
        self._runs += node == self._nodes[0]
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command(node),
                env=self._environ,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C reaches the launchers by way of this process alone
            )
        except OSError as error:
            raise UsageError(
                f"srun: cannot be started: {error.strerror}; it comes with Slurm's client programs"
            ) from None
        self._running[node] = process
        try:
            code = await process.wait()
        finally:
            del self._running[node]
        return _SIGNALLED - code if code < 0 else code

    async def _end_what_is_left(self, steps: Sequence[asyncio.Task[None]]) -> None:
        """Once the job has ended, end the steps that do not, as those on a node that cannot be reached."""
        while self._end_code() is None:
            await asyncio.sleep(1.0)
        _, late = await asyncio.wait(steps, timeout=_LEFT_S)
        for kill in (False, True):
            for node, process in list(self._running.items()):
                self._say(f"the step on {node} has outlived the job: it is ended")
                with suppress(ProcessLookupError):
                    process.kill() if kill else process.terminate()
            if late:
                _, late = await asyncio.wait(late, timeout=_LEFT_S)

    # Signals

    def _pass_on(self, number: signal.Signals) -> None:
        """Send a signal to the launchers, by way of Slurm: srun itself would kill the workers at once."""
        self._asked = number
        self._asking = asyncio.get_running_loop().create_task(self._signal_steps(number))

    async def _signal_steps(self, number: signal.Signals) -> None:
        listed = await output_of("squeue", "--noheader", "--steps", f"--jobs={self._job}", "--format=%i %j")
        steps = [line.split()[0] for line in listed.splitlines() if line.split()[1:] == [self._step_name]]
        if steps:
            await output_of("scancel", f"--signal={number.name.removeprefix('SIG')}", *steps)
        elif self._running:
            self._say(
                "Slurm does not tell the job's steps: srun is sent the signal, which ends the workers at once"
            )
            for process in self._running.values():
                with suppress(ProcessLookupError):
                    process.send_signal(number)

    # The end

    def _end(self) -> End | None:
        """What ``end.json`` tells; None where this run has not ended."""
        end = end_of(self._folder)
        return end if end != self._earlier else None

    def _end_code(self) -> int | None:
        """The exit code that ``end.json`` tells; None where this run has not ended."""
        end = self._end()
        return end.exit_code & 0xFF if end else None

    def _exit_code(self) -> int:
        """The job's exit code; by the launchers' own where the run's folder does not tell it."""
        code = self._end_code()
        if code is None:
            code = next((one for node in self._nodes if (one := self._codes[node])), 0)
            if code != UNUSABLE:
                self._say(
                    f"{self._folder / 'end.json'} was not written: the exit code is that of a launcher, {code}"
                )
        return code


def _check_shares(environ: Mapping[str, str], nodes: int) -> None:
    """Slurm refuses a step of one node, or lets it wait for ever, where it has spread --gpus=N unevenly."""
    here = number_in(environ, "SLURM_GPUS_ON_NODE", MOST_GPUS)
    total = environ["SLURM_GPUS"].rpartition(":")[2]  # a kind may come before, as a100:16
    if here is not None and total.isdigit() and int(total) != here * nodes:
        raise UsageError(
            f"--gpus={total}: Slurm spreads them unevenly over {nodes} nodes, {here} are here; "
            "say --gpus-per-node"
        )
