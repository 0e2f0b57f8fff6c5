"""Foreign text in our logs and on a terminal: one record stays one line, and no text moves the cursor."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import TracebackType

from keepstep.core.errors import UnsafePathError
from keepstep.core.own_folders import make_folder, open_file

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


class _OwnFile(logging.Handler):
    """Appends records to a file. One that cannot be written, as on a full disk, is left out, and counted."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._descriptor = path, -1
        self._lost, self._why = 0, ""
        self._is_torn = False  # the last line is not whole
        try:
            self._opened()
        except UnsafePathError:
            raise
        except OSError:
            return  # tried again with each record

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = f"{self.format(record)}\n"
        except Exception:
            self.handleError(record)
            return
        if self._lost:
            text = f"({self._lost} records are missing here: {self._why})\n{text}"
        content = f"{chr(10) * self._is_torn}{text}".encode(errors="backslashreplace")
        try:
            written = os.write(self._opened(), content)
        except OSError as error:
            self._lost, self._why = self._lost + 1, error.strerror
            return
        self._is_torn = written < len(content)
        self._lost, self._why = int(self._is_torn), "no room"

    def _opened(self) -> int:
        if self._descriptor < 0:
            make_folder(self._path.parent)
            self._descriptor = open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return self._descriptor


def log_into(path: Path, form: str) -> None:
    """Have this process append its log to a file. Raises UnsafePathError as ``open_file`` does.

    Whatever else is in the way of the file is waited for, and what was to be logged meanwhile is left out.
    """
    handler = _OwnFile(path)
    handler.setFormatter(OneLineFormatter(form))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
