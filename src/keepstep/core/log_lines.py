"""Foreign text in our logs and on a terminal: one record stays one line, and no text moves the cursor."""

from __future__ import annotations

import logging
import os
from io import TextIOWrapper
from pathlib import Path
from types import TracebackType

from keepstep.core.own_folders import open_file

LONGEST = 2000  # characters of a line
_LONGEST_TRACE = 16_384  # characters of a traceback

_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def one_line(text: str) -> str:
    r"""The text with unprintable characters (newlines, escapes, direction marks) written like ``\x1b``."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}… ({len(text)} characters)"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class OneLineFormatter(logging.Formatter):
    """Formats a record as one line; a traceback follows it in lines that cannot be taken for records."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(self, ei: _Raised) -> str:
        # Only the end of a long traceback is kept.
        lines = super().formatException(ei)[-_LONGEST_TRACE:].split("\n")
        return "\n".join(f"  | {one_line(line)}" for line in lines)


class _OwnFile(logging.FileHandler):
    def _open(self) -> TextIOWrapper:
        descriptor = open_file(Path(self.baseFilename), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")


def log_into(path: Path, form: str) -> None:
    """Have this process append its log to a file. Raises OSError and UnsafePathError as ``open_file`` does."""
    handler = _OwnFile(path)
    handler.setFormatter(OneLineFormatter(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
