"""Is there shared memory for data loaders and collectives? Containers are often given 64 MiB."""

from __future__ import annotations

import os
from collections.abc import Iterator

from keepstep.launch.node.checks import Found, Subject

_PATH = "/dev/shm"
_LEAST_BYTES = 1 << 20
_OF_A_RANK = 64 << 20


def look(subject: Subject, path: str = _PATH) -> Iterator[Found]:
    """Find whether shared memory is missing, cannot be written, or is too small for the ranks."""
    try:
        left = os.statvfs(path)
    except OSError as error:
        yield Found(f"node {subject.node}: {path}: {error.strerror}; mount a tmpfs there")
        return
    free, wanted = left.f_bavail * left.f_frsize, subject.nproc * _OF_A_RANK
    advice = "remove what others left there, or enlarge it (docker: --shm-size, --ipc=host)"
    if not os.access(path, os.W_OK):
        yield Found(f"node {subject.node}: {path} cannot be written; give this user the right to", unfit=True)
    elif free < _LEAST_BYTES:
        yield Found(f"node {subject.node}: {path} is full; {advice}", unfit=True)
    elif free < wanted:
        told = f"{free >> 20} MiB left for {subject.nproc} ranks (usual are {wanted >> 20})"
        yield Found(f"node {subject.node}: {path} has {told}; {advice}")
