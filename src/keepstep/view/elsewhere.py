"""Runs whose folder is not here: what their controller tells over the wire, laid out as a run folder.

Such a run is named by where its controller is reached, or was before it moved: ``HOST:PORT``, or ``ID@HOST:PORT`` where
the job has an id (``--rdzv-id``). The setting ``secret_file`` names the job's secret.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from keepstep import wire
from keepstep.core.config import config_path, resolve
from keepstep.core.errors import RunError, UsageError
from keepstep.core.own_folders import write_whole
from keepstep.launch.command.run_settings import SETTINGS
from keepstep.report.incidents import incident_to_json
from keepstep.traces import Run, name_run
from keepstep.view.follower import Follower

_NAMED = re.compile(
    r"(?:(?P<id>[^/]+)@)?(?P<address>(?:\[[0-9A-Fa-f:.%]+\]|[^\s/@:\[\]]+):\d{1,5})", re.DOTALL
)
_PATIENCE_S = 10.0
_kept: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def is_elsewhere(run: str) -> bool:
    """Whether this is no folder here, but the address of a controller."""
    is_here = any((folder / "run.json").exists() for folder in (Path(run), Path("runs", run)))
    return _NAMED.fullmatch(run) is not None and not is_here


def fetch_run(run: str) -> Run:
    """Ask the controller of ``run`` how it stands, and lay that out as the folder that `open_run` finds by this name.

    The folder has the status, all incidents, and where the controller is; no step times, rings and logs. Raises
    RunError where the controller does not answer or refuses, UsageError where no secret is named, and other
    KeepstepErrors where the secret or the certificate cannot be used.
    """
    found = _NAMED.fullmatch(run)
    assert found is not None
    options = resolve(SETTINGS, environ=os.environ, path=config_path(os.environ))
    secret = str(options["secret_file"].value)
    if not secret:
        raise UsageError(
            f"{run}: to ask a controller takes the job's secret; set KEEPSTEP_SECRET_FILE to its file"
        )
    kept = tempfile.TemporaryDirectory(prefix="keepstep-")
    _kept.append(kept)
    folder = Path(kept.name).resolve() / _file_name(run)
    (folder / "incidents").mkdir(parents=True)
    about: dict[str, Any] = {
        "id": folder.name,
        "run_id": found["id"] or wire.UNNAMED,
        "controller": found["address"],
        "secret_file": os.path.abspath(secret),
        "elsewhere": True,
    }
    _write(folder / "run.json", about)
    opened = Run(folder)
    follower = Follower(opened, _PATIENCE_S)
    try:
        told = follower.gather_all()
    except RunError as error:
        if isinstance(error.__cause__, wire.AnotherJob):
            text = f"{error}; name the job whose secret you have by its id, as ID@{found['address']}"
            raise RunError(text) from error
        raise
    finally:
        follower.close()
    rows = dict(told.ranks)
    nodes = [node | {"ranks": rows.get(int(node.get("node_rank", -1)), ())} for node in told.nodes]
    for incident in told.incidents:
        write_whole(folder / "incidents" / f"{incident.number:04d}.json", incident_to_json(incident))
    _write(folder / "status.json", told.status | {"nodes": nodes})
    _write(folder / "run.json", about | {"layout": told.layout} if told.layout else about)
    name_run(run, opened)
    return opened


def _write(path: Path, content: dict[str, Any]) -> None:
    write_whole(path, msgspec.json.encode(content))


def _file_name(run: str) -> str:
    """The name as that of a folder."""
    return run.encode("utf-8", "backslashreplace").decode()[:200].replace("\0", "?")
