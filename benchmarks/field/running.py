"""Runs a case as a user would, in a folder of its own, and gathers what came of it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.campaign.trial import processes_of, read_incidents
from benchmarks.field.judge import Seen
from benchmarks.field.truth import Truth

ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 40.0  # from SIGTERM to SIGKILL; the launcher gives its workers 30 s
_ANALYZE_S = 120.0
# A healthy job is given so many times its limit: how fast it is depends on the machine, and it is to come to its end.
HEALTHY = 3.0
_launchers: set[subprocess.Popen[bytes]] = set()
_given_up = threading.Event()


class GivenUp(Exception):
    """The bench is being ended: what became of the case is no result."""


def give_up() -> None:
    """End the jobs under way; each `run_case` then raises `GivenUp`, once its job is cleared away."""
    _given_up.set()
    for launcher in list(_launchers):
        launcher.terminate()


def missing(truth: Truth) -> str:
    """Why the case cannot be run here; empty where it can."""
    absent = [name for name in truth.needs if importlib.util.find_spec(name) is None]
    return f"{', '.join(absent)} not installed (`make test-long` installs them)" if absent else ""


def run_case(truth: Truth, source: Path, folder: Path, stretch: float = 1.0) -> Seen:
    """Run the case whose files are in ``source``; the job's limit is stretched by a factor, a healthy one's by more."""
    if _given_up.is_set():
        raise GivenUp(truth.name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if truth.analyze:
        return _analyze(source)
    shutil.copyfile(source / "train.py", folder / "train.py")
    run = folder / "run"
    command = [sys.executable, "-m", "keepstep.cli", "run", "--nproc-per-node", str(truth.ranks)]
    command += [*truth.flags, "--run-dir", str(run), "train.py"]
    with open(folder / "console.txt", "wb") as log:
        launcher = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _launchers.add(launcher)
        try:
            limit_s = truth.limit_s * stretch * (HEALTHY if truth.healthy else 1)
            cut_off = _wait(launcher, run, limit_s)
        finally:
            _launchers.discard(launcher)
    if _given_up.is_set():
        raise GivenUp(truth.name)
    return Seen(
        incidents=read_incidents(run),
        texts=[path.with_suffix(".txt").read_text() for path in _files(run)],
        run_text=(folder / "console.txt").read_text(errors="replace"),
        exit_code=launcher.returncode if launcher.returncode >= 0 else 128 - launcher.returncode,
        cut_off=cut_off,
    )


def _files(run: Path) -> list[Path]:
    found = sorted((run / "incidents").glob("[0-9]*.json"))
    return [path for path in found if path.with_suffix(".txt").exists()]


def _wait(launcher: subprocess.Popen[bytes], run: Path, limit_s: float) -> bool:
    """Wait for the end; True: the launcher was ended because it did not come. Nothing is left running."""
    cut_off = False
    try:
        launcher.wait(limit_s)
    except subprocess.TimeoutExpired:
        cut_off = True
        launcher.terminate()
        with suppress(subprocess.TimeoutExpired):
            launcher.wait(_PATIENCE_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        _end_left_overs(run)
    return cut_off


def _end_left_overs(run: Path) -> None:
    """Workers have groups of their own: whatever still belongs to the run 2 s later is killed."""
    until_s = time.monotonic() + 2
    while processes_of(run) and time.monotonic() < until_s:
        time.sleep(0.1)
    for pid in processes_of(run):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _analyze(source: Path) -> Seen:
    """Dumps are in a folder of the case; a log lies there by itself."""
    logs = sorted(source.glob("*.log"))
    path = source / "dumps" if (source / "dumps").is_dir() else logs[0]
    read = analyzed(path, "--json")
    told: dict[str, Any] = {}
    with suppress(json.JSONDecodeError):
        told = json.loads(read.stdout)
    incidents = told.get("incidents", [])
    text = analyzed(path)
    said = text.stdout + text.stderr
    return Seen(incidents, [said] * len(incidents), said, text.returncode)


def analyzed(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "keepstep.cli", "analyze", *flags, str(path)],
        capture_output=True,
        text=True,
        timeout=_ANALYZE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def scrubbed(text: str, folder: Path, samples: Path) -> str:
    """A text without paths of this machine."""
    packages = [(Path(path), "PACKAGES") for path in sys.path if path.endswith("-packages")]
    own = [(folder, "CASE"), (samples, "SAMPLES"), *packages, (ROOT, "REPOSITORY")]
    for path, name in (*own, (Path(sys.base_prefix), "PYTHON")):
        text = text.replace(str(path), name)
    return text
