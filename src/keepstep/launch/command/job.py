"""A checked request for one run: command line and settings become a ``Job``."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from keepstep.core.budgets import Limits, limits_of
from keepstep.core.config import config_path, resolve
from keepstep.core.errors import UsageError
from keepstep.core.kernel_records import KERNEL_LOG
from keepstep.core.tls_paths import TlsPaths
from keepstep.launch.command import flags
from keepstep.launch.command.addresses import own_name_with_domain
from keepstep.launch.command.allocated import fill_from_scheduler
from keepstep.launch.command.meeting import (
    DEFAULT_MASTER_PORT,
    Endpoint,
    Rendezvous,
    node_range,
    parse_endpoint,
    rendezvous_from,
)
from keepstep.launch.command.persisting import Persisting, persisting_from
from keepstep.launch.command.run_settings import SETTINGS

Number = TypeVar("Number", int, float)

STDOUT, STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class Streams:
    """Where the workers' output goes."""

    redirects: tuple[int, ...]  # for each local rank STDOUT | STDERR: what goes into a file
    tees: tuple[int, ...]  # likewise, what goes into a file and to the console
    shown: frozenset[int] | None  # local ranks shown on the console; None: all
    stdout_words: tuple[str, ...]  # lines of stdout with one of these words also go to a file of their own
    stderr_words: tuple[str, ...]  # likewise for stderr
    log_dir: Path | None  # folder for logs instead of the run folder
    prefix: str | None  # template of what stands before each line on the console; None: the usual one


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request to run a script on this node's share of a job."""

    script: str
    arguments: tuple[str, ...]
    entry: Literal["script", "module", "program"]
    nproc: int
    min_nodes: int
    max_nodes: int
    role: str
    run_id: str  # value of TORCHELASTIC_RUN_ID
    rendezvous: Rendezvous
    master_addr: str
    master_port: int  # 0: any free port
    max_restarts: int
    shrink_after_s: float  # how long a spare is waited for before the job goes on with fewer nodes
    restart_budget: Limits
    standbys: int  # number of warm processes that wait for a restart
    standby_idle_s: float  # for so long one warms on CPU time that others leave
    elects: bool  # another node hosts the controller when its own is lost
    in_place: bool  # at a restart, workers that can do so begin again in their own process
    signals: tuple[signal.Signals, ...]
    shutdown_timeout_s: float
    virtual_local_rank: bool
    streams: Streams
    keep_words: str  # streams of the workers that are kept while they are shown: "off", "stderr" or "all"
    kernel_log: str  # path of the kernel's log
    end_unix_s: float  # when the scheduler ends the job; 0: as the scheduler's environment says
    termination_log: str  # path of the file that a container's last message is read from
    run_dir: Path | None
    runs_dir: Path
    name: str
    node: str
    watch: bool
    check: bool  # check nodes before the start and after failures
    validate: bool  # hold the job and test devices and links when in doubt
    mitigate: str  # what is done about slowdowns that last: off, advise, auto
    restart_hangs: bool  # a process that certainly hangs is ended
    restore_corrupt: bool  # where it is sure whose state is wrong, all ranks go back to when it was right
    hang_patience_s: float  # how long one is left alone; 0: by the timeouts and pauses of its rank
    stopped_patience_s: float  # how long a stopped one is left alone
    secret_file: Path | None
    tls: TlsPaths | None
    controller_listen: Endpoint | None
    layout: str  # declared parallel layout; empty: inferred
    ring_records: int
    checkpoint_bytes: int  # 0: half of the node's memory
    persisting: Persisting | None  # None: checkpoints stay in memory
    dataset_paths: str  # with commas between; have to be readable on every node
    checkpoint_backups: int  # nodes that back up each rank's checkpoints in memory
    checkpoint_backup_rate: float  # most bytes a second that a node sends for backups; 0: no limit
    failure_domain: str  # label of the nodes that may be lost together with this one; empty: none are
    leave_s: float  # how long a worker may take to leave its training
    linger_s: float  # how long agent and controller may take to end
    quiet: bool
    verbose: bool
    dry_run: bool
    remarks: tuple[str, ...]  # lines to be said with -v
    warnings: tuple[str, ...]  # lines to be said always

    @property
    def elastic(self) -> bool:
        """Whether the job may go on with fewer nodes after losing some, and with more when they come."""
        return self.min_nodes < self.max_nodes and self.max_restarts > 0


def job_from_command_line(argv: Sequence[str], environ: Mapping[str, str]) -> Job:
    """Parse and check everything that was asked for. Raises UsageError, which says what to write instead."""
    try:
        return _checked(argv, environ)
    except UsageError as error:
        raise flags.with_variables(error, argv, environ) from None


def _checked(argv: Sequence[str], environ: Mapping[str, str]) -> Job:
    given = flags.parse(argv, environ)
    allocation = fill_from_scheduler(given, environ, own_name_with_domain())
    settings = resolve(
        SETTINGS,
        environ=environ,
        flags={one.name: getattr(given, one.name) for one in SETTINGS if hasattr(given, one.name)},
        path=config_path(environ),
    )
    value: dict[str, Any] = {name: item.value for name, item in settings.items()}
    min_nodes, max_nodes = node_range(given.nnodes)
    nproc = worker_count(given.nproc_per_node, environ)
    alone = given.standalone or (
        max_nodes == 1
        and given.rdzv_backend == "static"
        and not given.rdzv_endpoint
        and given.master_port is None
    )
    if given.standalone and max_nodes > 1:
        raise UsageError(f"--standalone --nnodes {given.nnodes}: one node only; use --rdzv-endpoint for more")
    if given.max_restarts < 0:
        raise UsageError(f"--max-restarts {given.max_restarts}: give 0 or more")
    return Job(
        script=given.training_script,
        arguments=tuple(given.training_script_args),
        entry=_entry(given),
        nproc=nproc,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        role=given.role,
        run_id=str(uuid.uuid4()) if alone else given.rdzv_id,
        rendezvous=rendezvous_from(given, max_nodes, value["join_timeout_s"]),
        master_addr="127.0.0.1" if alone else given.master_addr.strip("[]"),
        master_port=0 if alone else _master_port(given),
        max_restarts=given.max_restarts,
        shrink_after_s=_not_negative("--shrink-after", value["shrink_after_s"]),
        restart_budget=limits_of(value["restart_budget"]),
        standbys=_standbys(value["standbys"].strip(), given, nproc),
        standby_idle_s=_not_negative("KEEPSTEP_STANDBY_IDLE_S", value["standby_idle_s"]),
        elects=value["elect"] and max_nodes > 1 and given.max_restarts > 0,
        in_place=value["in_place"],
        signals=_signals(given.signals_to_handle),
        shutdown_timeout_s=_shutdown_timeout(given, environ),
        virtual_local_rank=given.virtual_local_rank,
        streams=_streams(given, nproc, environ),
        keep_words=_one_of("--keep-words", value["keep_words"].strip(), "stderr", "all", "off"),
        kernel_log=value["kernel_log"] or KERNEL_LOG,
        end_unix_s=_not_negative("KEEPSTEP_END_UNIX_S", value["end_unix_s"]),
        termination_log=value["termination_log"],
        run_dir=Path(given.run_dir).absolute() if given.run_dir else None,
        runs_dir=Path(value["runs_dir"]).absolute(),
        name=_name(given),
        node=value["node_name"] or allocation.node or os.uname().nodename,
        watch=value["watch"],
        check=value["check"],
        validate=value["validate"],
        mitigate=_one_of("--mitigate", value["mitigate"].strip(), "auto", "advise", "off"),
        restart_hangs=_one_of("--on-hang", value["on_hang"].strip(), "report", "restart") == "restart"
        and given.max_restarts > 0,
        restore_corrupt=_one_of("--on-corrupt", value["on_corrupt"].strip(), "report", "restore") == "restore"
        and given.max_restarts > 0,
        hang_patience_s=_not_negative("--hang-patience", value["hang_patience_s"]),
        stopped_patience_s=_not_negative("--stopped-patience", value["stopped_patience_s"]),
        secret_file=Path(value["secret_file"]).absolute() if value["secret_file"] else None,
        tls=_tls(value),
        controller_listen=parse_endpoint("--controller-listen", value["controller_listen"], 0)
        if value["controller_listen"]
        else None,
        layout=_layout(value["layout"], nproc * max_nodes if min_nodes == max_nodes else None),
        ring_records=value["ring_records"],
        checkpoint_bytes=value["checkpoint_bytes"],
        persisting=persisting_from(value),
        dataset_paths=value["dataset_paths"],
        checkpoint_backups=_not_negative("--checkpoint-backups", value["checkpoint_backups"]),
        checkpoint_backup_rate=_not_negative("--checkpoint-backup-rate", value["checkpoint_backup_rate"]),
        failure_domain=_label(
            "--failure-domain", value["failure_domain"].strip() or allocation.failure_domain
        ),
        leave_s=value["leave_s"],
        linger_s=value["linger_s"],
        quiet=given.quiet,
        verbose=given.verbose,
        dry_run=given.dry_run,
        remarks=tuple(flags.without_meaning(given)),
        warnings=(*allocation.warnings, *_not_carried_out(given, environ)),
    )


def _not_carried_out(given: argparse.Namespace, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Lines about flags that were given and change nothing."""
    lines: list[str] = []
    if given.numa_binding:
        lines.append(f"--numa-binding {given.numa_binding} is not carried out: workers run unbound")
    # A variable is often set by what starts the nodes, on each of them, whatever the rendezvous is.
    is_written = "node_rank" in given.said and environ.get("PET_NODE_RANK") != str(given.node_rank)
    if is_written and given.rdzv_backend == "c10d" and node_range(given.nnodes)[1] > 1:
        lines.append(
            f"--node-rank {given.node_rank} has no effect with --rdzv-backend c10d, where the rendezvous numbers the "
            "nodes; --rdzv-backend static keeps it"
        )
    return tuple(lines)


def _one_of(flag: str, text: str, *words: str) -> str:
    if text not in words:
        raise UsageError(f"{flag} {text}: say {', '.join(words[:-1])} or {words[-1]}")
    return text


def _standbys(text: str, given: argparse.Namespace, nproc: int) -> int:
    if text != "auto" and not (text.isascii() and text.isdigit()):
        raise UsageError(f"--standbys {text}: give a number of processes, auto, or 0 for none")
    if not given.max_restarts or given.no_python:
        return 0
    return nproc if text == "auto" else min(int(text), nproc)


def _not_negative(flag: str, value: Number) -> Number:
    if not 0 <= value < float("inf"):
        raise UsageError(f"{flag} {value}: give 0 or more")
    return value


def _label(flag: str, text: str) -> str:
    if text:
        from keepstep.wire.messages import MOST_LABEL

        if len(text) > MOST_LABEL or not text.isprintable():
            raise UsageError(
                f"{flag} {text[:20]!r}…: give at most {MOST_LABEL} printable characters, for example rack-7"
            )
    return text


def _layout(text: str, world_size: int | None) -> str:
    """Check a declared layout against the number of ranks, where that is known."""
    if text:
        from keepstep.core.layout import ParallelLayout  # here, because it loads numpy

        layout = ParallelLayout.declared(text)
        if world_size is not None:
            layout.check_world(world_size)
    return text


def stream_masks(flag: str, text: str, nproc: int) -> tuple[int, ...]:
    """``3`` or ``0:1,1:3`` as one mask for each local rank. Raises UsageError for a text of another form."""
    if re.fullmatch("[0-3]", text):
        return (int(text),) * nproc
    if not re.fullmatch("([0-9]{1,9}:[0-3],)*[0-9]{1,9}:[0-3]", text):
        raise UsageError(f"{flag} {text}: give 0, 1 (stdout), 2 (stderr) or 3 (both), or LOCAL_RANK:N,...")
    masks = [0] * nproc
    for pair in text.split(","):
        rank, mask = pair.split(":")
        if int(rank) < nproc:
            masks[int(rank)] = int(mask)
    return tuple(masks)


def _entry(given: argparse.Namespace) -> Literal["script", "module", "program"]:
    if given.run_path:
        return "script"
    if given.module and given.no_python:
        raise UsageError("--no-python and --module exclude each other: leave one out")
    return "module" if given.module else "program" if given.no_python else "script"


def _name(given: argparse.Namespace) -> str:
    script = given.training_script
    name = given.name or (script if given.module else Path(script).stem)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


def _master_port(given: argparse.Namespace) -> int:
    # As in torchrun, the port counts only where the rendezvous is static.
    if given.rdzv_backend != "static":
        return 0
    return DEFAULT_MASTER_PORT if given.master_port is None else given.master_port


def _signals(text: str) -> tuple[signal.Signals, ...]:
    found: list[signal.Signals] = []
    for name in (word.strip() for word in text.split(",") if word.strip()):
        value = getattr(signal, name, None)
        if not isinstance(value, signal.Signals) or value in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            raise UsageError(f"--signals-to-handle {text}: {name} is no signal that can be handled")
        found.append(value)
    return tuple(found)


def _shutdown_timeout(given: argparse.Namespace, environ: Mapping[str, str]) -> float:
    seconds: Any = given.shutdown_timeout
    if seconds is None:
        seconds = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 30
    try:
        if float(seconds) >= 0:
            return float(seconds)
    except ValueError:
        pass
    raise UsageError(f"--shutdown-timeout {seconds}: give a number of seconds, 0 or more")


def _streams(given: argparse.Namespace, nproc: int, environ: Mapping[str, str]) -> Streams:
    shown = None
    if given.local_ranks_filter:
        if not re.fullmatch(r"\s*[0-9]+\s*(,\s*[0-9]+\s*)*", given.local_ranks_filter):
            raise UsageError(f"--local-ranks-filter {given.local_ranks_filter}: give local ranks, as 0,1,2")
        shown = frozenset(map(int, given.local_ranks_filter.split(",")))
    if given.log_dir and os.path.isfile(given.log_dir):
        raise UsageError(f"--log-dir {given.log_dir}: that is a file; give a folder")
    return Streams(
        redirects=stream_masks("--redirects", given.redirects, nproc),
        tees=stream_masks("--tee", given.tee, nproc),
        shown=shown,
        stdout_words=tuple(given.duplicate_stdout_filters or ()),
        stderr_words=tuple(given.duplicate_stderr_filters or ()),
        log_dir=Path(given.log_dir).absolute() if given.log_dir else None,
        prefix=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
    )


def _tls(value: Mapping[str, Any]) -> TlsPaths | None:
    files = {name: value[name] for name in ("tls_cert", "tls_key", "tls_ca")}
    if not any(files.values()):
        return None
    for name, file in files.items():
        if not os.path.isfile(file):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} {file or '(missing)'}: mutual TLS needs --tls-cert, --tls-key and --tls-ca"
            )
    return TlsPaths(*(str(Path(file).absolute()) for file in files.values()))


def interpreter(environ: Mapping[str, str]) -> str:
    """The Python that runs the script: ``$PYTHON_EXEC``, else the launcher's own, as in torchrun."""
    return environ.get("PYTHON_EXEC") or sys.executable


def worker_count(text: str, environ: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """The number of workers that ``--nproc-per-node text`` asks for.

    ``cpu``: the CPUs this process may use. ``gpu``: the NVIDIA devices under ``dev`` that
    ``CUDA_VISIBLE_DEVICES`` leaves visible. ``auto``: GPUs where there are any, else CPUs.

    Raises:
        UsageError: the text is neither a positive number nor one of these words, or there is no GPU for ``gpu``.
    """
    if re.fullmatch(r"[0-9]{1,6}", text.strip()):
        count = int(text)
        if count < 1:
            raise UsageError(f"--nproc-per-node {text}: give at least 1")
        return count
    if text == "cpu":
        return cpu_count()
    if text in ("gpu", "auto"):
        count = gpu_count(environ, dev)
        if count == 0 and text == "gpu":
            raise UsageError(
                f"--nproc-per-node gpu: no NVIDIA device visible on {os.uname().nodename}; give a number, or cpu"
            )
        return count or cpu_count()
    raise UsageError(f"--nproc-per-node {text}: give a number, auto, cpu or gpu")


def cpu_count() -> int:
    """Number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


def gpu_count(environ: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """Number of NVIDIA devices that a CUDA program sees in this environment; a MIG instance named there is one."""
    present = sum(1 for path in dev.glob("nvidia[0-9]*") if path.name[len("nvidia") :].isdigit())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or present == 0:
        return present
    count = 0
    for entry in (word.strip() for word in visible.split(",")):
        # CUDA stops at the first entry that names no device.
        if (entry.isdigit() and int(entry) >= present) or not re.match(r"[0-9]+$|GPU-|MIG-", entry):
            break
        count += 1
    return count
