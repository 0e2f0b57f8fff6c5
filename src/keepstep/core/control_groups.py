"""The folders in which the kernel accounts for a process: its control group and all groups around that one.

Groups nest (a step of a Slurm job, a container in a container, systemd's slices), and the limit of a group holds for
all processes inside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

PROC = Path("/proc")
ROOT = Path("/")


def groups_of(pid: int, proc: Path = PROC) -> bytes:
    """The control groups that a process is in, as the kernel tells them; empty where it cannot be read."""
    try:
        return (proc / str(pid) / "cgroup").read_bytes()
    except OSError:
        return b""


def folders(
    controller: str,
    pid: int | None = None,
    *,
    proc: Path = PROC,
    mounts: Path | None = None,
    root: Path = ROOT,
) -> tuple[tuple[Path, ...], ...]:
    """For each hierarchy that may have ``controller`` (version 1, version 2): the group's folder, then those around it.

    A list ends where the hierarchy is mounted: the groups around a container cannot be seen from inside. ``pid``: None
    is this process. ``root``: the folder below which mount points are looked for. Empty where nothing can be read.
    """
    try:
        groups = (proc / ("self" if pid is None else str(pid)) / "cgroup").read_text().splitlines()
        lines = (mounts or proc / "self" / "mountinfo").read_text().splitlines()
    except OSError:
        return ()
    found: dict[tuple[Path, ...], None] = {}
    for line in groups:
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controller in controllers.split(","):
            mounted = tuple(_mounted(lines, controller))
        elif number == "0" and not controllers:
            mounted = tuple(_mounted(lines, ""))
        else:
            continue
        found.update(dict.fromkeys(_upwards(group, mounted, root)))
    return tuple(found)


def _mounted(lines: Sequence[str], controller: str) -> Iterator[tuple[str, str]]:
    """For each mount of a hierarchy, the group that is mounted (in a container only a part) and where.

    ``controller``: "" is the hierarchy of version 2.
    """
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3:
            continue
        of_controller = tail[0] == "cgroup" and controller in tail[2].split(",")
        if of_controller if controller else tail[0] == "cgroup2":
            yield _unescaped(fields[3]), _unescaped(fields[4])


def _unescaped(text: str) -> str:
    """A path of ``mountinfo``, in which blanks and the like are octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _upwards(group: str, mounted: Sequence[tuple[str, str]], root: Path) -> Iterator[tuple[Path, ...]]:
    inside = [(mount, below) for top, mount in mounted if (below := _below(group, top)) is not None]
    for mount, below in inside or [(mount, _guessed(root / mount.strip("/"), group)) for _, mount in mounted]:
        top = root / mount.strip("/")
        folder = top / below.strip("/")
        yield (folder, *(one for one in folder.parents if one == top or top in one.parents))


def _guessed(top: Path, group: str) -> str:
    """The path below a mount point of a group that lies outside our namespace, or was mounted outside it.

    Where it is not found below the mount point, the mount point itself is taken.
    """
    return group if ".." not in group.split("/") and (top / group.strip("/")).is_dir() else ""


def _below(group: str, top: str) -> str | None:
    """The path of a group relative to a mounted one; None when it is not inside it, or cannot be told."""
    if ".." in group.split("/") or ".." in top.split("/"):
        return None
    if top == "/":
        return group
    return group[len(top) :] if group == top or group.startswith(f"{top}/") else None
