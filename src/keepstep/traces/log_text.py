"""The lines of text logs, plain or gzipped, in bounded memory, and which rank wrote a line."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

LONGEST_LINE = 1 << 16  # bytes; what a line has beyond is not looked at
_CHUNK = 1 << 20
_CONTROL = re.compile(r"\x1b\[[0-9;?]{0,32}[A-Za-z]")
_LABEL = re.compile(
    r"\[rank ?(?P<torch>\d{1,7})\]|\[1,(?P<mpi>\d{1,7})\]<std|^\s{0,8}(?P<slurm>\d{1,7}): |"
    r"^\((?:[^()]{0,80}\W)?rank=(?P<ray>\d{1,7})\b|\[(?P<local>(?:default|trainer|worker)_?\d{1,7})\]:"
)
LABEL_WITHIN = 160  # characters at a line's begin that may hold the label


def text_lines(path: Path, skipped_bytes: int = 0) -> Iterator[bytes]:
    """The lines of a file without their ends. Carriage returns, as progress bars write them, end lines, too.

    ``skipped_bytes``: so many at the file's begin are left out; compressed files are read from their begin.

    Raises:
        OSError, EOFError: the file cannot be read, or its compressed data ends early; lines before come first.
    """
    with open(path, "rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    with gzip.open(path) if zipped else open(path, "rb") as file:
        if skipped_bytes and not zipped:
            file.seek(skipped_bytes)
        rest = b""
        while chunk := file.read1(_CHUNK):
            *whole, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            for line in whole:
                yield line[:LONGEST_LINE]
            # No more than this of a line is ever used, so that what follows may be glued to the cut.
            rest = rest[:LONGEST_LINE]
        if rest:
            yield rest


def plain_text(line: bytes) -> str:
    """The line as text, without colours and other control sequences of terminals."""
    text = line.decode(errors="replace")
    return _CONTROL.sub("", text) if "\x1b" in text else text


def speaker(text: str) -> tuple[str, int | None]:
    """Who wrote a line, by the label that launchers put before it: the label, and the rank if the label is a rank.

    ``[rank5]:`` of PyTorch, ``5:`` of ``srun -l``, ``[1,5]<stdout>`` of ``mpirun`` and ``(Worker rank=5 pid=…)`` of Ray
    are ranks; ``[default5]:`` of ``torchrun`` counts within a node. Without a label: ``("", None)``.
    """
    found = _LABEL.search(text, 0, LABEL_WITHIN)
    if found is None:
        return "", None
    if found["local"]:
        return found["local"], None
    rank = int(found["torch"] or found["mpi"] or found["slurm"] or found["ray"])
    return str(rank), rank
