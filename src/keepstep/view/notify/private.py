"""Addresses and passwords: read from a file of mode 0600 or the environment, never shown."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from keepstep.core.errors import AuthenticationError, UsageError
from keepstep.wire.secret import refuse_shared

_MOST_BYTES = 8192
BLANK = "***"


def read_private(path: Path) -> str:
    """The one line in a file that only its owner can read.

    Raises:
        UsageError: it cannot be read, others may read it, or it holds anything else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; write it with `(umask 077; cat > {path})`") from None
    with os.fdopen(descriptor, "rb") as file:
        try:
            refuse_shared(path, os.fstat(descriptor))
        except AuthenticationError as error:
            raise UsageError(str(error)) from None
        content = file.read(_MOST_BYTES + 1)
    return _one_line(content, str(path))


def from_environment(name: str, environ: Mapping[str, str]) -> str:
    """The one line in an environment variable. Raises UsageError where it is not set."""
    value = environ.get(name)
    if not value:
        raise UsageError(f"the environment variable {name} is not set")
    return _one_line(os.fsencode(value), name)


def _one_line(content: bytes, where: str) -> str:
    try:
        text = content.decode().strip()
    except UnicodeDecodeError:
        text = ""
    if not text or not text.isprintable() or len(content) > _MOST_BYTES:
        raise UsageError(f"{where}: must hold one line of at most {_MOST_BYTES} bytes, and nothing else")
    return text


def redacted(text: str, secrets: tuple[str, ...]) -> str:
    """The text with every secret in it blanked."""
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, BLANK)
    return text
