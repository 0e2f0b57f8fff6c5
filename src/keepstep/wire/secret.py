"""The run's secret, which is in a file that only its owner can read, never in an argument or environment variable.

In a pod it is root's, and the group that the pod was given may read it.

Several runs may share one secret, as all runs of a user do by default. So a program proves itself with a ``RunKey``:
the secret, and the id of the run that the program belongs to.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from keepstep.core.errors import AuthenticationError

SECRET_BYTES = 32
TAG_BYTES = 32
UNNAMED = "none"  # id of a run to which the user gave none; the same as torchrun's
MOST_NAME = 64  # most characters of a run's name in messages
_LARGEST_FILE_BYTES = 4096
_FINGERPRINT_DIGITS = 8


@dataclass(frozen=True, slots=True)
class RunKey:
    """The key with which a program proves that it belongs to a run.

    Attributes:
        secret: the bytes that ``read_secret`` returned.
        run_id: the id of the run (``--rdzv-id``), of any length.
        tag: a hash of the id that only holders of the secret can compute.
        name: the id as messages show it, in at most ``MOST_NAME`` characters.
    """

    secret: bytes = field(repr=False)
    run_id: str = UNNAMED
    tag: bytes = field(init=False, repr=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        whole = self.run_id.encode("utf-8", "backslashreplace")
        object.__setattr__(self, "tag", hmac.digest(self.secret, b"run\0" + whole, "sha256"))
        name = whole.decode()
        if len(name) > MOST_NAME:
            fingerprint = hashlib.sha256(whole).hexdigest()[:_FINGERPRINT_DIGITS]
            name = f"{name[: MOST_NAME - 1 - _FINGERPRINT_DIGITS]}…{fingerprint}"
        object.__setattr__(self, "name", name)


def write_secret(path: str | os.PathLike[str]) -> bytes:
    """Create a secret of 32 random bytes, write it in hex to ``path`` with mode 0600, and return it.

    Raises:
        AuthenticationError: the file exists already, or the folder cannot be written to.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError as error:
        raise AuthenticationError(
            f"{path}: there is a secret already; use it, or remove it to begin a new run"
        ) from error
    except OSError as error:
        raise AuthenticationError(f"{path}: cannot write the run's secret: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.write(secret.hex() + "\n")
    return secret


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Read a secret that ``write_secret`` wrote (or any 32 to 2048 bytes in hex).

    Raises:
        AuthenticationError: the file is missing, readable by others than a group to which it was mounted, owned by
            another user, or holds no secret.
    """
    try:
        # O_NONBLOCK, because opening a FIFO must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise AuthenticationError(
            f"{path}: cannot read the run's secret: {error.strerror}; every node needs the secret file of the run "
            f"(copy it, or put the run folder on a shared file system)"
        ) from error
    try:
        refuse_shared(Path(path), os.fstat(descriptor))
        text = os.read(descriptor, _LARGEST_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    try:
        secret = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        secret = b""
    if len(secret) < SECRET_BYTES or len(text) > _LARGEST_FILE_BYTES:
        raise AuthenticationError(
            f"{path}: is no secret: wants at least {SECRET_BYTES} bytes as hexadecimal digits "
            f"(make one with: openssl rand -hex {SECRET_BYTES})"
        )
    return secret


def _is_mounted_for_us(status: os.stat_result) -> bool:
    """Whether it is as Kubernetes mounts a secret: root's, and only a group of ours (fsGroup) may read it besides."""
    is_ours = status.st_gid in (os.getegid(), *os.getgroups())
    return status.st_uid == 0 and is_ours and not status.st_mode & 0o037


def refuse_shared(path: Path, status: os.stat_result) -> None:
    """Raise AuthenticationError for a file with a secret that is no plain file, or that others may read or own."""
    if not stat.S_ISREG(status.st_mode):
        raise AuthenticationError(f"{path}: is not a regular file; the secret must be one, with mode 0600")
    if status.st_mode & 0o077 and not _is_mounted_for_us(status):
        raise AuthenticationError(
            f"{path}: can be read or written by others (mode {stat.S_IMODE(status.st_mode):04o}); "
            f"run: chmod 600 {path} (in a pod: mount the secret with defaultMode 0440)"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise AuthenticationError(
            f"{path}: belongs to user {status.st_uid}, not to you ({os.geteuid()}); copy it as your own with mode 0600"
        )
