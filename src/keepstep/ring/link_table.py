"""The link table of one rank: written by the NCCL profiler plugin in the training process, read by its agent.

Like a ring it lives in a memfd of the launcher, reached as ``/proc/PID/fd/N``, and outlives its writer. The format is
in ``native/link_table.hpp``, the reasoning in ``docs/design/links.md``, the reader in ``keepstep.ring.link_reader``.
This module has what a launcher needs, without numpy.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

LINKS = 2048  # links of the tables that a launcher makes
FEWEST, MOST = 16, 1 << 16  # links of a table
MAGIC, VERSION = 0x4B4E494C5453504B, 1  # "KPSTLINK"
HEADER_WORDS, COMM_WORDS, LINK_WORDS = 512, 48, 152
COMMS = 255

PLUGIN = "NCCL_PROFILER_PLUGIN"
LIBRARY = "libkeepstep_nccl_profiler.so"
_MOST_PATH = 240  # characters; NCCL keeps 255 of the plugin's path


def mix(h: int, word: int) -> int:
    """Add a word to the checksum ``h``."""
    h = (h ^ word) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return h ^ h >> 29


def header_check(links: int) -> int:
    """Checksum of the header of a table of that many links."""
    return mix(mix(MAGIC, VERSION), links) | 1


def total_bytes(links: int) -> int:
    """Size of a table with that many links."""
    return 8 * (HEADER_WORDS + COMMS * COMM_WORDS + links * LINK_WORDS)


def create(links: int = LINKS) -> int:
    """A new table in a memfd, size sealed, its memory taken; the descriptor, which the caller closes.

    Raises:
        ValueError: a table cannot have that many links.
        OSError: there is no memory for it.
    """
    if not FEWEST <= links <= MOST:
        raise ValueError(f"a link table has {FEWEST} to {MOST} links, not {links}")
    size = total_bytes(links)
    descriptor = os.memfd_create("keepstep-links", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        os.pwrite(descriptor, struct.pack("<5Q", MAGIC, VERSION, links, size, header_check(links)), 0)
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def plugin(environ: Mapping[str, str]) -> Path | None:
    """The plugin for workers' NCCL to load; None: it was not built, its path is too long, or the user chose another.

    NCCL reads its settings from files, too. They count less than the environment, so a plugin that they name would be
    overruled by ours.
    """
    native = find_spec("keepstep.ring._native")
    if native is None or native.origin is None:
        return None
    path = Path(native.origin).with_name(LIBRARY)
    if PLUGIN in environ or file_with_plugin(environ) is not None:
        return None
    return path if path.is_file() and len(str(path)) <= _MOST_PATH else None


def file_with_plugin(environ: Mapping[str, str]) -> str | None:
    """The file with NCCL's settings that names a plugin, if one does."""
    files = [environ.get("NCCL_CONF_FILE") or "~/.nccl.conf", "/etc/nccl.conf"]
    return next((file for file in files if _sets_plugin(Path(file))), None)


def _sets_plugin(file: Path) -> bool:
    """Whether a file with NCCL's settings names a plugin."""
    try:
        with file.expanduser().open("rb") as lines:
            return any(line.split(b"=")[0].strip() == PLUGIN.encode() for line in lines)
    except (OSError, RuntimeError):  # there is no such file, or no home folder
        return False
