"""The programs beside the workers, controller and agent: their commands, and how each is kept running."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepstep.core.budgets import as_text
from keepstep.core.errors import RunError, UnsafePathError
from keepstep.core.kernel_records import KERNEL_LOG
from keepstep.core.own_folders import make_folder, open_file
from keepstep.core.within import within
from keepstep.launch.command.job import Job
from keepstep.launch.command.meeting import Endpoint
from keepstep.launch.command.placement import COOKIE, OURS, Place
from keepstep.launch.node.waiting_program import Waiting
from keepstep.launch.workers.gpu_memory import PATIENCE_S
from keepstep.launch.workers.guard import signal_group
from keepstep.launch.workers.processes import Child, Processes, end_group, give_priority

if TYPE_CHECKING:
    from keepstep.launch.workers.incarnation import Workers

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 10.0
TRIES = 8
CANNOT_START = 2  # exit code of a program that would fail in the same way when tried again
# Beyond --shutdown-timeout, to kill workers, end what they leave behind, and have their GPUs' memory free.
HALT_MARGIN_S = 30.0 + PATIENCE_S
_PROGRAM_WORDS = 3  # words of a command before its arguments: Python, -m, the module
STEADY_S = 60.0  # a program that lived this long is given all its tries again


def environment() -> dict[str, str]:
    """The launcher's environment without the variables that mark a process as a worker."""
    return {name: value for name, value in os.environ.items() if name != COOKIE and name not in OURS}


def _opened(log: Path) -> int:
    """Descriptor of a log, or of nothing where it cannot be written, as on a full disk. Raises UnsafePathError."""
    try:
        make_folder(log.parent)
        return open_file(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except UnsafePathError:
        raise
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


class Companion:
    """A program that is kept running: when it dies it is started again, while training goes on."""

    def __init__(
        self,
        name: str,
        command: Callable[[], Sequence[str]],
        processes: Processes,
        *,
        gave_up: Callable[[str], None],
        log: Path | None = None,
        ready: Callable[[dict[str, Any]], None] | None = None,
        waiting: Waiting | None = None,
    ) -> None:
        """``command`` is called before each start, ``gave_up`` with the reason once the program has died too often.

        ``log``: file for stdout and stderr. ``ready`` is called with the first line of its stdout, a JSON object.
        ``waiting``: a process of the same program that may have done its imports already; it needs a ``log``.
        """
        self._name, self._command, self._processes = name, command, processes
        self._gave_up, self._log, self._ready, self._waiting = gave_up, log, ready, waiting
        self._child: Child | None = None
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self._was_ready = ready is None
        self._ended = asyncio.Event()
        self._ended.set()
        self._line = b""

    @property
    def pid(self) -> int | None:
        """The program's process, None while there is none."""
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start the program and keep it running."""
        self._timer = None
        output = None
        try:
            if self._log:
                output = _opened(self._log)
                if self._take():
                    return
            self._child = self._processes.start(
                self._name,
                self._command(),
                environment(),
                on_exit=self._exited,
                saves=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self._ready else output,
                stderr=output,
            )
        except (OSError, RunError) as error:
            if isinstance(error, UnsafePathError):
                self._failures = TRIES
            self._again(str(error))
            return
        finally:
            if output is not None:
                os.close(output)
        self._ended.clear()
        if self._child.stdout:
            self._line = b""
            os.set_blocking(self._child.stdout.fileno(), False)
            asyncio.get_running_loop().add_reader(self._child.stdout.fileno(), self._read, self._child)

    def _take(self) -> bool:
        """Whether a process that waited has become the program's."""
        if self._waiting is None or self._log is None:
            return False
        words = self._command()[_PROGRAM_WORDS:]
        child = self._waiting.take(words, self._log)
        if child is None:
            return False
        self._processes.become(child, self._name, self._exited)
        child.started_s = time.monotonic()
        self._child = child
        self._ended.clear()
        return True

    def give_way(self, seconds: float) -> None:
        """Let the process run only on CPU time that others leave, for so long."""
        if self._child:
            give_priority(self._child, low=True, idle=True)
            usual = partial(give_priority, self._child, low=False, idle=True)
            asyncio.get_running_loop().call_later(seconds, usual)

    def may_end(self) -> None:
        """Do not start the program again when it ends, nor tell that it is ready: its work is done."""
        self._stopping = True

    async def stop(self, patience_s: float) -> None:
        """End the program with SIGTERM, and with SIGKILL after ``patience_s``."""
        self._stopping = True
        if self._timer:
            self._timer.cancel()
        child = self._child
        if child is None:
            return
        end_group(child.pid, signal.SIGTERM)
        try:
            await within(patience_s, self._ended.wait())
        except asyncio.TimeoutError:
            signal_group(child.pid, signal.SIGKILL)
            await self._ended.wait()

    def _exited(self, child: Child) -> None:
        if child.stdout:
            asyncio.get_running_loop().remove_reader(child.stdout.fileno())
            child.stdout.close()
        self._processes.clear(child)
        self._child = None
        self._ended.set()
        if not self._stopping:
            if child.ended_s - child.started_s >= STEADY_S:
                self._failures = 0
            if child.status == CANNOT_START and not self._was_ready:
                self._failures = TRIES
            self._again(f"ended with status {child.status}")

    def _again(self, reason: str) -> None:
        self._failures += 1
        if self._failures > TRIES:
            self._gave_up(reason)
            return
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (self._failures - 1))
        self._timer = asyncio.get_running_loop().call_later(wait_s, self.start)

    def _read(self, child: Child) -> None:
        assert child.stdout is not None
        try:
            data = os.read(child.stdout.fileno(), 4096)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(child.stdout.fileno())
            return
        if b"\n" in self._line:
            return
        self._line += data
        if b"\n" in self._line and self._ready:
            try:
                said: Any = json.loads(self._line.split(b"\n")[0])
            except ValueError:
                said = None
            if isinstance(said, dict) and said.get("ready") and not self._stopping:  # pyright: ignore[reportUnknownMemberType]
                self._was_ready = True
                self._ready(said)  # pyright: ignore[reportUnknownArgumentType]


def council_file(folder: Path, term: int) -> Path:
    """The file in which the controller of a term keeps who elects; nodes may share the run folder."""
    return folder / f"council-{term}.json"


def stop_file(council: Path) -> Path:
    """The file in which a controller keeps how the job ends, apart from that of a controller that replaced it."""
    return council.with_suffix(".stop.json")


def controller_command(
    job: Job, folder: Path, secret: Path, listen: Endpoint, *, seat: int = 0, term: int = 0
) -> list[str]:
    """The controller's command line. ``seat``: this launcher's, and ``term``, where the controller can move."""
    backups = job.checkpoint_backups and job.watch and job.max_nodes > 1
    return [
        *_program("keepstep.control", job, folder, secret),
        *("--listen", str(listen)),
        *("--nodes", str(job.max_nodes)),
        *("--join-timeout", f"{job.rendezvous.join_timeout_s:g}"),
        *(("--shrink-after", f"{job.shrink_after_s:g}") if job.elastic else ()),
        *("--halt-timeout", f"{job.shutdown_timeout_s + HALT_MARGIN_S:g}"),
        *(("--layout", job.layout) if job.layout else ()),
        *(("--restart-budget", as_text(job.restart_budget)) if job.max_restarts else ()),
        *(() if job.validate else ("--no-validate",)),
        *(("--mitigate", job.mitigate) if job.mitigate != "auto" else ()),
        *(("--restart-hangs",) if job.restart_hangs else ()),
        *(("--restore-corrupt",) if job.restore_corrupt else ()),
        *(("--hang-patience", f"{job.hang_patience_s:g}") if job.hang_patience_s else ()),
        *("--stopped-patience", f"{job.stopped_patience_s:g}"),
        *(("--max-restarts", str(job.max_restarts)) if job.max_restarts else ()),
        *(("--backups", str(job.checkpoint_backups)) if backups else ()),
        *(("--seat", str(seat), "--term", str(term)) if seat else ()),
        *(("--council", str(council_file(folder, term))) if seat else ()),
    ]


def agent_command(
    job: Job,
    folder: Path,
    secret: Path,
    controller: Endpoint,
    place: Place,
    pages: Mapping[str, Mapping[int, str]],
    cache: str,
    workers: Callable[[], Workers | None] = lambda: None,
) -> list[str]:
    """The agent's command line.

    ``pages``: paths by rank of what workers and agent share, by flag: ``ring``, ``orders`` and ``links``. ``cache``:
    the address of the node's cache, "" without one. ``workers()``: the newest ones.
    """
    command = [
        *_program("keepstep.agent", job, folder, secret),
        *("--controller", str(controller)),
        *("--node", job.node),
        *("--node-rank", str(place.node_rank)),
        *("--world-size", str(place.world_size)),
        *("--incarnation", str(place.incarnation)),
        *(("--cache", cache) if cache else ()),
    ]
    if job.persisting:
        command += ["--checkpoint-dir", job.persisting.where, "--checkpoint-keep", str(job.persisting.keep)]
    if cache and job.checkpoint_backups and job.max_nodes > 1:
        command += ["--backups", str(job.checkpoint_backups)]
        command += ["--backup-rate", f"{job.checkpoint_backup_rate:g}"] if job.checkpoint_backup_rate else []
        command += [f"--failure-domain={job.failure_domain}"] if job.failure_domain else []
    for flag, paths in pages.items():
        for rank, path in sorted(paths.items()):
            command += [f"--{flag}", f"{rank}={path}"]
    if job.kernel_log != KERNEL_LOG:
        command += ["--kernel-log", job.kernel_log]
    if (watched := workers()) is not None:
        for rank, pid in sorted(watched.pids.items()):
            command += ["--worker", f"{rank}={pid}"]
        for rank, streams in sorted(watched.words.items()):
            for stream in streams:
                command += ["--words", f"{rank}={stream}"]
    return command


def _program(module: str, job: Job, folder: Path, secret: Path) -> list[str]:
    """The beginning of a command line: what both programs are told."""
    command = [sys.executable, "-m", module, "--run-dir", str(folder), "--secret-file", str(secret)]
    command += [f"--run-id={job.run_id}"]
    if job.tls:
        command += ["--tls-cert", job.tls.cert, "--tls-key", job.tls.key, "--tls-ca", job.tls.ca]
    return command
