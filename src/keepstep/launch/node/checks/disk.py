"""Can the folders that a run writes to be written to, and have they space left?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from keepstep.launch.node.checks import Found, Subject

_LEAST_BYTES = 16 << 20  # with less free space a run cannot write its own files
_FEW_BYTES = 1 << 30


def look(subject: Subject) -> Iterator[Found]:
    """Find folders that cannot be written to, or have little space left; one finding for each at most."""
    for folder in subject.folders:
        found = _folder(subject.node, folder)
        if found is not None:
            yield found


def _folder(node: str, folder: Path) -> Found | None:
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    probe = there / f".keepstep-check-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"keepstep")
        finally:
            os.close(descriptor)
            os.unlink(probe)
        left = os.statvfs(there)
    except OSError as error:
        what = f"node {node}: {folder} cannot be written: {error.strerror}"
        return Found(f"{what}; mount it there, free space on it, or name another folder", unfit=True)
    free = left.f_bavail * left.f_frsize
    if free < _LEAST_BYTES or (left.f_files and not left.f_favail):
        what = f"{free >> 20} MiB" if free < _LEAST_BYTES else "no inodes"
        return Found(f"node {node}: {folder} has {what} left; free some or name another folder", unfit=True)
    if free < _FEW_BYTES:
        return Found(f"node {node}: {folder} has {free >> 20} MiB left; free some space")
    return None
