"""The words of a job from log files of any launcher: one file, or a folder with one of each rank or node."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from keepstep.core.errors import TraceError
from keepstep.core.told import Seen, Words
from keepstep.detect.failure_rows import RowMatcher
from keepstep.detect.listener import Listener, split_lines
from keepstep.detect.sightings import Sightings
from keepstep.traces.log_text import chunks, utf16_encoding

MOST_FILES = 4096
_MOST_FILE_BYTES = 8 << 30
_MOST_FOLDERS_DEEP = 6
_SHOWN_LINE_BYTES = 2000
_SUFFIXES = ("", ".log", ".txt", ".out", ".err", ".gz", ".stderr", ".stdout", ".json", ".jsonl")
_RANK = re.compile(r"(?:^|[^a-z])rank[-_ ]?(\d{1,7})(?:\D|$)", re.IGNORECASE)
_BINARY = 0.1  # A file whose head has a greater share of zero bytes is no text.


def read_words(path: Path, matcher: RowMatcher) -> list[Words]:
    """What the logs at a path tell, one for each file.

    Raises:
        TraceError: there is nothing that can be read; the message says what is wanted.
    """
    files = _logs(path)
    if len(files) == 1:
        file, name, rank = files[0]
        return [_words(file, matcher, name, rank)]
    found = [words for one in files if (words := _readable(matcher, *one)) is not None]
    if not found:
        raise TraceError(f"{path}: none of its {len(files)} files can be read as a log")
    return found


def sightings(paths: Iterable[Path], wanted: Iterable[str]) -> Seen:
    """What the logs at some paths had of some texts (by `like`); files that cannot be read have had nothing.

    Raises:
        TraceError: there is no log at one of the paths.
    """
    found = Sightings(wanted)
    for path in paths:
        for file, name, rank in _logs(path):
            found.begin(name, rank)
            taken = 0
            try:
                for chunk in _utf8(file):
                    found.take(chunk)
                    taken += len(chunk)
                    if taken > _MOST_FILE_BYTES:
                        break
            except (OSError, EOFError):
                pass
            found.end()
    return found.seen()


def lines_of(path: Path, source: str, begin: int, end: int) -> list[str]:
    """The lines of a log of `read_words` from one number to another, with both; fewer where the file has changed."""
    file = path / source if path.is_dir() else path
    found: list[str] = []
    number, rest = 0, b""
    try:
        for chunk in _utf8(file):
            *lines, rest = split_lines(rest + chunk)
            if number + len(lines) >= begin:
                found += [
                    line[:_SHOWN_LINE_BYTES].decode(errors="replace")
                    for line in lines[max(begin - number - 1, 0) : end - number]
                ]
            number += len(lines)
            if number >= end:
                return found
            rest = rest[:_SHOWN_LINE_BYTES]
    except (OSError, EOFError):
        return found
    return [*found, rest.decode(errors="replace")] if rest and number + 1 >= begin else found


def _logs(path: Path) -> list[tuple[Path, str, int | None]]:
    """The logs at a path, each with its name and the rank that wrote it, as far as its name tells.

    Raises:
        TraceError: there is none, or there are too many.
    """
    if not path.exists():
        raise TraceError(
            f"{path}: there is nothing there; give a log, a folder of logs, or a run of keepstep"
        )
    if not path.is_dir():
        return [(path, path.name, None)]
    files = _files(path)
    if not files:
        raise TraceError(
            f"{path}: no log is in it (names end in .log, .txt, .out, .err); give the file itself"
        )
    if len(files) > MOST_FILES:
        raise TraceError(f"{path}: holds more than {MOST_FILES} logs; give a folder of one job")
    names = [(file, str(file.relative_to(path))) for file in files]
    return [(file, name, _rank_of(name)) for file, name in names]


def _rank_of(name: str) -> int | None:
    ranks = _RANK.findall(name)
    return int(ranks[-1]) if ranks else None


def _files(folder: Path) -> Sequence[Path]:
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders.sort()
        if len(Path(place).relative_to(folder).parts) >= _MOST_FOLDERS_DEEP:
            folders.clear()
        for name in sorted(names):
            entry = Path(place, name)
            known = entry.suffix.lower() in _SUFFIXES or re.fullmatch(
                r"\.\d{1,4}|\.[eo]\d{1,12}", entry.suffix
            )
            if known and not name.startswith(".") and entry.is_file():
                found.append(entry)
                if len(found) > MOST_FILES:
                    return found
    return found


def _readable(matcher: RowMatcher, path: Path, name: str, rank: int | None) -> Words | None:
    try:
        return _words(path, matcher, name, rank)
    except TraceError:
        return None


def _words(path: Path, matcher: RowMatcher, name: str, rank: int | None) -> Words:
    listener = Listener(matcher, name, rank)
    taken = 0
    try:
        for chunk in _utf8(path):
            if taken == 0 and chunk[:4096].count(0) > _BINARY * len(chunk[:4096]):
                raise TraceError(f"{path}: is no text; give the log itself, not what it was packed into")
            listener.take(chunk)
            taken += len(chunk)
            if taken > _MOST_FILE_BYTES:
                break
    except (OSError, EOFError) as error:
        if taken == 0:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise TraceError(f"{path}: cannot be read: {why}; check its name and rights") from error
    return listener.words()


def _utf8(path: Path) -> Iterator[bytes]:
    """The bytes of a file; text in UTF-16 is turned into UTF-8."""
    encoding = utf16_encoding(path)
    if not encoding:
        yield from chunks(path)
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    for chunk in chunks(path):
        yield decoder.decode(chunk).encode(errors="replace")
