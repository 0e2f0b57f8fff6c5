"""The lines of text logs, plain or gzipped, in bounded memory, and which rank wrote a line."""

from __future__ import annotations

import contextlib
import errno
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from keepstep.core.regular_files import open_regular

LONGEST_LINE = 1 << 12  # bytes; what a line has beyond is not looked at
_CHUNK = 1 << 20
_HEAD_BYTES = 4096
_UNPACKED_BYTES = 16 << 20  # beyond which a compressed file may have
_MOST_RATIO = 300  # times its size unpacked; logs have 5 to 100 times
_MOST_UNPACKED_BYTES = 256 << 20
_EMPTY_LINES = re.compile(rb"\n\n+")
_CONTROL = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]")
_RANK = re.compile(r"\[rank ?(\d{1,7})\]")
_LABEL = re.compile(
    r"\[1,(?P<mpi>\d{1,7})\]<std|^\s{0,8}(?P<slurm>\d{1,7}): |"
    r"^\((?:[^()]{0,80}\W)?rank=(?P<ray>\d{1,7})\b|\[(?P<local>(?:default|trainer|worker)_?\d{1,7})\]:"
)
LABEL_WITHIN = 160  # characters at a line's begin that may hold the label


def text_lines(path: Path, skipped_bytes: int = 0) -> Iterator[bytes]:
    """The lines of a file without their ends, no empty ones. Carriage returns, as in progress bars, end lines, too.

    ``skipped_bytes``: so many at the file's begin are left out; compressed files are read from their begin.

    Raises:
        OSError, EOFError: the file cannot be read, or its compressed data ends early; lines before come first.
    """
    with open_regular(path) as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0 if zipped else skipped_bytes)
        rest = b""
        for chunk in _unpacked(raw, path) if zipped else iter(lambda: raw.read(_CHUNK), b""):
            if b"\n\n" in chunk:
                chunk = _EMPTY_LINES.sub(b"\n", chunk)
            *whole, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            for line in filter(None, whole):
                yield line[:LONGEST_LINE]
            # No more than this of a line is ever used, so that what follows may be glued to the cut.
            rest = rest[:LONGEST_LINE]
        if rest:
            yield rest


def chunks(path: Path) -> Iterator[bytes]:
    """The bytes of a file, plain or gzipped, a MiB at a time.

    Raises:
        OSError, EOFError: as `text_lines`.
    """
    with open_regular(path) as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        yield from _unpacked(raw, path) if zipped else iter(lambda: raw.read(_CHUNK), b"")


def is_text(path: Path) -> bool:
    """Whether a file, plain or gzipped, begins with text in UTF-8."""
    with contextlib.suppress(OSError, EOFError):
        head = next(text_lines(path), b"")[:_HEAD_BYTES]
        # A character may be cut at the end.
        text = head.decode(errors="ignore")
        return bool(head) and len(text.encode()) >= len(head) - 3 and "\0" not in text
    return False


def utf16_encoding(path: Path) -> str:
    """The encoding of a file that begins with text in UTF-16, by iconv's names; "" for others.

    Every second byte of such text is mostly zero, and no other. PowerShell writes it.
    """
    with open_regular(path) as raw:
        head = raw.read(_HEAD_BYTES)
    first, second = head[::2].count(0), head[1::2].count(0)
    if min(first, second) > 0 or len(head) < 8 or 8 * max(first, second) < 3 * len(head):
        return ""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    return "UTF-16LE" if second else "UTF-16BE"


def _unpacked(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    taken = 0
    try:
        with gzip.open(raw) as file:
            while chunk := file.read1(_CHUNK):
                taken += len(chunk)
                if taken > max(_UNPACKED_BYTES, _MOST_RATIO * raw.tell()):
                    what = f"unpacks to more than {_MOST_RATIO} times its size, as no log does"
                    raise OSError(errno.EFBIG, what, str(path))
                if taken > _MOST_UNPACKED_BYTES:
                    what = f"only its first {_MOST_UNPACKED_BYTES >> 20} MiB are unpacked; unpack it yourself"
                    raise OSError(errno.EFBIG, what, str(path))
                yield chunk
    except zlib.error as error:
        raise OSError(errno.EIO, f"its compressed data is damaged ({error})", str(path)) from None


def plain_text(line: bytes) -> str:
    """The line as text, without colours and other control sequences of terminals."""
    text = line.decode(errors="replace")
    return _CONTROL.sub("", text) if "\x1b" in text else text


def speaker(text: str) -> tuple[str, int | None]:
    """Who wrote a line, by the label that launchers put before it: the label, and the rank if the label is a rank.

    ``[rank5]:`` of PyTorch, ``5:`` of ``srun -l``, ``[1,5]<stdout>`` of ``mpirun`` and ``(Worker rank=5 pid=…)`` of Ray
    are ranks; ``[default5]:`` of ``torchrun`` counts within a node. Without a label: ``("", None)``.
    """
    own = _RANK.search(text, 0, LABEL_WITHIN)
    if own is not None:  # what a launcher puts before it may be a number of a task, not of a rank
        return str(int(own[1])), int(own[1])
    found = _LABEL.search(text, 0, LABEL_WITHIN)
    if found is None:
        return "", None
    if found["local"]:
        return found["local"], None
    rank = int(found["mpi"] or found["slurm"] or found["ray"])
    return str(rank), rank
