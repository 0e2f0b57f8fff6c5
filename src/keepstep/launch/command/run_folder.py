"""The run folder as the launcher makes and keeps it: ``run.json``, the secret, log paths, ``end.json``."""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, cast

from keepstep.core.errors import AuthenticationError, RunError, UnsafePathError, UsageError
from keepstep.core.own_folders import make_folder, make_new_folder, real_path, write_whole
from keepstep.core.process_mark import is_alive
from keepstep.launch.command.job import Job
from keepstep.launch.command.meeting import Endpoint

_REACH_S = 2.0
_NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)

# What a run leaves in its folder, and a later run in the same folder moves aside.
_CONTENT = (
    "run.json",
    "secret",
    "status.json",
    "ranks.msgpack",
    "placement.json",
    "stop.json",
    *(f"council-{term}{end}" for term in range(1, 100) for end in (".json", ".stop.json")),
    "end.json",
    "controller.log",
    "incidents",
    "nodes",
    "rings",
    "logs",
)


def folder_of(job: Job, environ: Mapping[str, str], now_s: float) -> Path:
    """The run folder: ``--run-dir``, else one that is named after the job's id or the time.

    On several nodes the name has to be the same everywhere, so it is ``--rdzv-id`` or the Slurm job's number where
    there is one.
    """
    if job.run_dir:
        return job.run_dir
    if job.rendezvous.endpoint:
        if job.run_id != "none":
            return job.runs_dir / _as_name(job.run_id)
        slurm = environ.get("SLURM_JOB_ID")
        if slurm:
            again = environ.get("SLURM_RESTART_COUNT", "0")
            return job.runs_dir / f"{slurm}{'' if again == '0' else f'.{again}'}-{job.name}"
    return job.runs_dir / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now_s))}-{job.name}"


def is_of_slurm_job(job: Job, environ: Mapping[str, str]) -> bool:
    """Whether `folder_of` names the folder after this start of this Slurm job, so that no other run is in it."""
    unnamed = job.run_dir is None and job.run_id == "none"
    return unnamed and job.rendezvous.endpoint is not None and "SLURM_JOB_ID" in environ


def _as_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text).strip(".-") or "run"


def create(job: Job, path: Path, *, first: bool) -> Path:
    """Make the folder; the launcher of node 0 (``first``) also moves an earlier run's content aside.

    Without ``--run-dir`` a name that is taken gets a number appended; where nobody has said where runs are kept and the
    working directory cannot be written, the folder is made in that for temporary files. Raises RunError where it cannot
    be made or written, others can write to it, or it is that of a living run.
    """
    try:
        return _create(job, path, first=first)
    except UnsafePathError as error:
        raise RunError(f"{error}; --run-dir names another run folder") from None
    except OSError as error:
        if error.errno in _NOT_WRITABLE and job.run_dir is None and job.runs_dir == Path("runs").absolute():
            own = real_path(Path(tempfile.gettempdir())) / f"keepstep-{os.getuid()}"
            with suppress(OSError, UnsafePathError):
                make_folder(own)  # refused where it is another user's
                return _create(job, own / "runs" / path.name, first=first)
        raise RunError(
            f"{path}: cannot make the run folder: {error.strerror}; name another with --run-dir"
        ) from None


def _create(job: Job, path: Path, *, first: bool) -> Path:
    if job.run_dir is None and not job.rendezvous.endpoint:
        return _create_new(real_path(path.parent) / path.name)
    path = real_path(path)
    make_folder(path)
    if first:
        _move_aside(path)
    return path


def _create_new(path: Path) -> Path:
    for number in range(1, 1000):
        candidate = path if number == 1 else path.with_name(f"{path.name}.{number}")
        try:
            make_new_folder(candidate)
            return candidate
        except FileExistsError:
            continue
    raise RunError(f"{path}: a thousand runs have this name; give another with --name or --run-dir")


def _move_aside(path: Path) -> None:
    if not (path / "run.json").exists():
        # A run that died before it was described may have left its secret, which is of no use any more.
        (path / "secret").unlink(missing_ok=True)
        return
    record = _described(path)
    if record.get("host") == os.uname().nodename and is_alive(record.get("launcher")):
        raise RunError(
            f"{path}: the run of process {record['launcher']['pid']} lives there; give another --run-dir"
        )
    previous = path / "previous"
    make_folder(previous)
    numbered = (previous / str(number) for number in count(1))
    aside = next(folder for folder in numbered if not folder.exists())
    make_new_folder(aside)
    for name in _CONTENT:
        if os.path.lexists(path / name):
            (path / name).rename(aside / name)


def _described(folder: Path) -> dict[str, Any]:
    """The content of ``run.json``; empty where it is missing or cannot be read."""
    try:
        found: Any = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def secret_path(job: Job, folder: Path, home: Path | None) -> Path:
    """The file with the secret: ``--secret-file``; ``RUN/secret`` on one node or with ``--run-dir``; else in the home.

    Raises UsageError where it would be in the user's home, and there is none.
    """
    if job.secret_file:
        return job.secret_file
    if job.rendezvous.endpoint is None or job.run_dir:
        return folder / "secret"
    if home is None:
        raise UsageError(
            "no place for the nodes' secret: HOME is not set, and this user has no home folder; "
            "name a file that all nodes have with --secret-file, or a shared folder with --run-dir"
        )
    return home / ".config" / "keepstep" / "secret"


def ensure_secret(path: Path) -> bool:
    """Make the secret file (0600), whole at once, unless it is there; returns whether it was made.

    Raises AuthenticationError where it cannot be made, or the one that is there cannot be used.
    """
    from keepstep.wire.secret import read_secret, write_secret

    if os.path.exists(path):  # False also where this user may not look: then an error below says so
        read_secret(path)
        return False
    draft = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_secret(draft)
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise AuthenticationError(
            f"{path}: cannot make the secret: {error.strerror}; name a file with --secret-file"
        ) from None
    return True


def controller(folder: Path) -> Endpoint | None:
    """The address of the newest controller, as ``run.json`` in a shared folder has it; None: it is not known."""
    host, _, port = str(_described(folder).get("controller")).rpartition(":")
    return Endpoint(host.strip("[]"), int(port)) if port.isdecimal() else None


def lives_elsewhere(folder: Path) -> bool:
    """Whether the run in this folder goes on with a controller that has moved to another host."""
    at, record = controller(folder), _described(folder)
    here, term = record.get("host") == os.uname().nodename, record.get("term")
    if at is None or here or not isinstance(term, int) or term < 2 or (folder / "end.json").exists():
        return False
    try:
        socket.create_connection((at.host, at.port), _REACH_S).close()
    except OSError:
        return False
    return True


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that a reader sees the old file or the new one, never half of it. Raises OSError."""
    write_whole(path, f"{json.dumps(content, indent=2)}\n".encode())


class LogFiles:
    """Paths of the workers' logs: ``RUN/logs/rank-00003/``, or torchrun's layout under ``--log-dir``."""

    def __init__(self, folder: Path, log_dir: Path | None, run_id: str) -> None:
        self._folder = folder / "logs"
        self._log_dir = real_path(log_dir) / f"{_as_name(run_id)}_{folder.name}" if log_dir else None

    def of(self, rank: int, local_rank: int, attempt: int) -> Path:
        """The log folder of one worker; it is made if need be."""
        path = self._folder / f"rank-{rank:05d}"
        if self._log_dir:
            path = self.attempt(attempt) / str(local_rank)
        make_folder(path)
        return path

    def attempt(self, attempt: int) -> Path:
        """The folder for logs of several workers."""
        path = self._log_dir / f"attempt_{attempt}" if self._log_dir else self._folder
        make_folder(path)
        return path

    def error_file(self, rank: int, local_rank: int, attempt: int) -> Path:
        """The file for a worker's error; that of an earlier attempt is renamed, with the attempt's number."""
        path = self.of(rank, local_rank, attempt) / "error.json"
        if os.path.lexists(path):
            path.replace(path.with_name(f"error.{attempt - 1}.json"))
        return path
