"""Runs that live on this machine, as the command lines of their launchers, agents and controllers tell."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_FLAG = b"--run-dir"
_MOST_BYTES = 64 << 10  # of a command line


def live_folders(proc: Path = Path("/proc"), uid: int | None = None) -> list[Path]:
    """The folders of runs with a process of this user here, each once; of all users for root.

    ``uid``: whose processes are looked at, else those of the caller.
    """
    uid = os.getuid() if uid is None else uid
    found: dict[Path, None] = {}
    for name in os.listdir(proc):
        if not name.isdecimal():
            continue
        try:
            if uid != 0 and os.stat(proc / name).st_uid != uid:
                continue
            with open(proc / name / "cmdline", "rb") as file:
                words = file.read(_MOST_BYTES).split(b"\0")
            if folder := _run_dir(words):
                # A relative path counts from where that process is.
                found[Path(os.path.normpath(os.path.join(os.readlink(proc / name / "cwd"), folder)))] = None
        except (OSError, ValueError):
            continue  # it has ended, or is not ours to look at
    return list(found)


def _run_dir(words: Sequence[bytes]) -> str:
    """The run's folder in the command line of one of our processes; empty in that of any other."""
    if not any(
        word.startswith(b"keepstep.") or word.rpartition(b"/")[2] == b"keepstep" for word in words[:4]
    ):
        return ""
    for place, word in enumerate(words):
        if word == _FLAG and place + 1 < len(words):
            return os.fsdecode(words[place + 1])
        if word.startswith(_FLAG + b"="):
            return os.fsdecode(word[len(_FLAG) + 1 :])
    return ""
