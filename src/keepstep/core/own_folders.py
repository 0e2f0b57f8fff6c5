"""Files and folders that are ours alone: no symbolic link on the way to them is followed, nobody else can plant one.

Every file of a run is opened here. Paths must be real ones; ``real_path`` finds that of a folder which a user names.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from keepstep.core.errors import UnsafePathError

_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LINKED = "is reached over a symbolic link or a file, and no link is followed there: remove it"
_made: dict[int, os.stat_result] = {}  # owner and mode of a file that we made with mode 0600, by file system


def real_path(path: Path) -> Path:
    """Where a folder that the user names really is; it need not exist yet.

    Raises:
        UnsafePathError: another user decides where it is.
    """
    for one in (path, *path.parents):
        if one.is_symlink() and one.parent.stat().st_mode & stat.S_IWOTH and _is_foreign(one.lstat()):
            text = "is a symbolic link that another user put there: use another folder"
            raise UnsafePathError(errno.ELOOP, text, str(one))
    real = path.resolve()
    for one in (real, *real.parents):
        if one.exists() and (status := one.stat()).st_mode & stat.S_IWOTH and _is_foreign(status):
            text = f"belongs to user {status.st_uid} and can be written by everybody: use another folder"
            raise UnsafePathError(errno.EPERM, text, str(one))
    return real


def open_to_all(path: Path) -> Path | None:
    """The folder above ``path`` in which everybody may rename files; None when there is none.

    An ``emptyDir`` is no such folder, although it comes with this mode: only containers of its pod see it.
    """
    for one in path.parents:
        mode = one.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX and not is_empty_dir(one):
            return one
    return None


def is_empty_dir(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether Kubernetes has mounted an ``emptyDir`` here, as the path tells from which the kubelet mounts one."""
    with suppress(OSError, UnicodeDecodeError):
        for line in mounts.read_text().splitlines():
            root, point = line.split()[3:5]
            if point == str(path) and "/volumes/kubernetes.io~empty-dir/" in root:
                return True
    return False


def make_folder(path: Path) -> None:
    """Make a folder and the folders above it, whatever the umask, unless they exist.

    Raises:
        UnsafePathError: the folder exists and is not ours alone, or a link leads to it.
        OSError: it cannot be made.
    """
    with _opened(path, path, make=True) as folder:
        _refuse_foreign(folder, path)


def make_new_folder(path: Path) -> None:
    """Make a folder that must not exist yet, and those above it. Raises FileExistsError, else as ``make_folder``."""
    with _opened(path.parent, path, make=True) as parent:
        os.mkdir(path.name, 0o755, dir_fd=parent)


def open_file(path: Path, flags: int) -> int:
    """Open a file to write to it; returns a descriptor. Raises OSError and UnsafePathError as ``make_folder`` does."""
    with _opened(path.parent, path) as folder:
        _refuse_foreign(folder, path.parent)
        return os.open(path.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=folder)


def unwritten(folder: Path, why: str) -> str:
    """What the operator is told once while a run's folder cannot be written, as when its disk is full."""
    return (
        f"{folder} cannot be written ({why}): watching goes on in memory, and files follow once there is room"
    )


def write_whole(path: Path, content: bytes | bytearray) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it. Raises as ``open_file`` does."""
    draft = f".{path.name}.{os.getpid()}"
    with _opened(path.parent, path) as folder:
        _refuse_foreign(folder, path.parent)
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)
        try:
            with os.fdopen(os.open(draft, _NEW_FILE, 0o644, dir_fd=folder), "wb") as file:
                file.write(content)
            os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise


@contextmanager
def _opened(folder: Path, wanted: Path, *, make: bool = False) -> Generator[int]:
    """A descriptor of ``folder``. Errors, also those in the body of the ``with``, name ``wanted``."""
    descriptor = os.open("/", _FOLDER)
    try:
        for name in folder.absolute().parts[1:]:
            below = _below(descriptor, name, make)
            os.close(descriptor)
            descriptor = below
        yield descriptor
    except UnsafePathError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsafePathError(errno.ELOOP, _LINKED, str(wanted)) from None
        error.filename = str(wanted)
        raise
    finally:
        os.close(descriptor)


def _below(descriptor: int, name: str, make: bool) -> int:
    """A descriptor of the folder with this name in the open one; it is made if it is missing and ``make`` is set."""
    try:
        return os.open(name, _FOLDER, dir_fd=descriptor)
    except FileNotFoundError:
        if not make:
            raise
    with suppress(FileExistsError):
        os.mkdir(name, 0o755, dir_fd=descriptor)
    return os.open(name, _FOLDER, dir_fd=descriptor)


def _refuse_foreign(descriptor: int, path: Path) -> None:
    """Raise UnsafePathError for a folder that belongs to, or can be written by, another user."""
    status = os.fstat(descriptor)
    is_ours, shared = status.st_uid == os.geteuid(), _is_shared(status)
    if is_ours and not shared:
        return
    # Some file systems give all files one owner (NFS with root_squash) or one mode (CIFS): then ours are no different.
    made = _as_made(descriptor, status.st_dev)
    if not is_ours and not (made and made.st_uid == status.st_uid):
        text = f"belongs to user {status.st_uid}, not to you ({os.geteuid()}): use a folder of your own"
        raise UnsafePathError(errno.EPERM, text, str(path))
    if shared and not (made and made.st_mode & 0o022):
        mode = stat.S_IMODE(status.st_mode)
        text = f"can be written by others (mode {mode:04o}): run chmod go-w on it, or use another folder"
        raise UnsafePathError(errno.EPERM, text, str(path))


def _is_foreign(status: os.stat_result) -> bool:
    return status.st_uid not in (os.geteuid(), 0)


def _is_shared(status: os.stat_result) -> bool:
    """Whether other users can write there."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_private(status.st_gid, os.geteuid())


@cache
def _is_private(group: int, user: int) -> bool:
    """Whether the group is a user's own one: many systems make one for each user and set the umask to 002."""
    import grp
    import pwd

    try:
        whose, members = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    name = whose.pw_name
    return whose.pw_gid == group and members.gr_name == name and set(members.gr_mem) <= {name}


def _as_made(folder: int, device: int) -> os.stat_result | None:
    """Owner and mode that the file system gives a file of ours; None where we can make none."""
    if device not in _made:
        name = f".keepstep-{os.urandom(8).hex()}"
        try:
            probe = os.open(name, _NEW_FILE, 0o600, dir_fd=folder)
        except OSError:
            return None
        _made[device] = os.fstat(probe)
        os.close(probe)
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
    return _made[device]
