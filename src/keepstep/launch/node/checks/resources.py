"""Has the node what a run needs: folders to write to, shared memory, memory, and the port that was asked for?"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from keepstep.core.control_groups import PROC, ROOT
from keepstep.core.node_memory import bounds
from keepstep.launch.node.checks import Found, Subject

_LEAST_DISK_BYTES = 16 << 20  # with less free space a run cannot write its own files
_FEW_DISK_BYTES = 1 << 30
_SHARED = "/dev/shm"
_LEAST_SHARED_BYTES = 1 << 20
_SHARED_OF_A_RANK = 64 << 20  # containers are often given this for all ranks
_LEAST_SHARE = 0.03  # least free share of the memory of the node or its control group
_MOST_STALLED = 20.0  # per cent of the last 10 s in which every process waited for memory


def disk(subject: Subject) -> Iterator[Found]:
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
    if free < _LEAST_DISK_BYTES or (left.f_files and not left.f_favail):
        what = f"{free >> 20} MiB" if free < _LEAST_DISK_BYTES else "no inodes"
        return Found(f"node {node}: {folder} has {what} left; free some or name another folder", unfit=True)
    if free < _FEW_DISK_BYTES:
        return Found(f"node {node}: {folder} has {free >> 20} MiB left; free some space")
    return None


def shared_memory(subject: Subject, path: str = _SHARED) -> Iterator[Found]:
    """Find whether shared memory is missing, cannot be written, or is too small for data loaders and collectives."""
    try:
        left = os.statvfs(path)
    except OSError as error:
        yield Found(f"node {subject.node}: {path}: {error.strerror}; mount a tmpfs there")
        return
    free, wanted = left.f_bavail * left.f_frsize, subject.nproc * _SHARED_OF_A_RANK
    advice = "remove what others left there, or enlarge it (docker: --shm-size, --ipc=host)"
    if not os.access(path, os.W_OK):
        yield Found(f"node {subject.node}: {path} cannot be written; give this user the right to", unfit=True)
    elif free < _LEAST_SHARED_BYTES:
        yield Found(f"node {subject.node}: {path} is full; {advice}", unfit=True)
    elif free < wanted:
        told = f"{free >> 20} MiB left for {subject.nproc} ranks (usual are {wanted >> 20})"
        yield Found(f"node {subject.node}: {path} has {told}; {advice}")


def memory(subject: Subject, proc: Path = PROC, root: Path = ROOT) -> Iterator[Found]:
    """Find whether the node, or the control group around the job, has too little memory left."""
    for bound in bounds(proc, root):
        if bound.available_bytes >= _LEAST_SHARE * bound.total_bytes:
            continue
        told = f"{bound.available_bytes >> 20} of {bound.total_bytes >> 20} MiB are available"
        if bound.group is None:
            yield Found(f"node {subject.node}: {told}; end what else runs there")
        else:
            yield Found(
                f"node {subject.node}: {told} in control group {bound.group}; end what else runs in it, "
                "or give the job a higher memory limit"
            )
        return
    pressure = proc / "pressure" / "memory"
    stalled = re.search(r"full avg10=([\d.]+)", pressure.read_text()) if pressure.exists() else None
    if stalled and float(stalled[1]) >= _MOST_STALLED:
        yield Found(
            f"node {subject.node}: everything waited for memory for {stalled[1]} % of the last 10 s; "
            "end what else runs there, or give the job less"
        )


def ports(subject: Subject) -> Iterator[Found]:
    """Find whether the port that was asked for cannot be used."""
    if not subject.port:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", subject.port))
        except OSError as error:
            yield Found(
                f"node {subject.node}: port {subject.port} cannot be used: {error.strerror}; "
                "give another --master-port, or none for any free one",
                unfit=True,
            )
