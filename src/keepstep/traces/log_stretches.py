"""The lines behind a verdict: stretches of logs around the line that tells the cause and around what followed it."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from keepstep.core.incident import Incident, SpokenLine
from keepstep.core.ranges import fold_ranks
from keepstep.core.regular_files import open_regular
from keepstep.core.told import Failure, Stretch, Told
from keepstep.detect.failure_rows import RowMatcher
from keepstep.detect.listener import Listener, split_lines
from keepstep.detect.secrets import blanked
from keepstep.traces.failure_log import lines_of

MOST_LOGS = 12
"""Stretches of so many logs are shown."""
BEFORE, AFTER = 6, 6
"""So many lines before and after one that tells something are shown."""
MOST_LINES = 60
"""So many lines of one stretch are shown: of a longer traceback those nearest its end."""
_END_LINES = 10  # How many last lines of a log are shown that tells of nothing.
_MOST_BYTES = (256 << 10) + (2 << 20)  # How much of one file is read.
_MOST_OF_ALL_RUNS_BYTES = 256 << 10  # How much is read of a file that has the words of all incarnations.
_LINE_BYTES = 2000
_TELLING = ("cause", "suspect", "exception", "outcome")
# The words of an incarnation, as the launcher keeps them, and files of --redirects, to which each one appends.
_KEPT = re.compile(
    r"(?:stderr|stdout|output)\.(?P<incarnation>\d{1,9})(?P<end>\.end)?\.log|(?:stderr|stdout)\.log"
)


def around(
    lines: Sequence[str], marks: Collection[int], begins: int = 0
) -> tuple[int, tuple[str, ...], frozenset[int]]:
    """The stretch around the first of ``marks`` and those of them that are near.

    Args:
        lines: of a log; ``marks``: indices into them, at least one.
        begins: index from which the stretch is to begin, as of a traceback, where that is earlier.

    Returns:
        The index of its first line, its lines, and which of those, counted from its begin, are marked.
    """
    first = min(marks)
    begin = max(min(first - BEFORE, begins), first + 1 + AFTER - MOST_LINES, 0)
    end = min(first + 1 + AFTER, len(lines))
    return begin, tuple(lines[begin:end]), frozenset(at - begin for at in marks if begin <= at < end)


def stretches_of_logs(path: Path, failure: Failure) -> list[Stretch]:
    """Stretches of the logs at a path around what a failure rests on; that of the cause comes first."""
    found: list[Stretch] = []
    by_log: dict[str, list[Told]] = {}
    for one in (*([failure.root] if failure.root else ()), *failure.then, *failure.followers):
        by_log.setdefault(one.source, []).append(one)
    for log, told in list(by_log.items())[:MOST_LOGS]:
        first, marks = told[0], {one.number for one in told}
        near = max(
            min(first.number - BEFORE, first.begins or first.number), first.number + 1 + AFTER - MOST_LINES, 1
        )
        lines = lines_of(path, log, near, first.number + AFTER)
        marked = frozenset(number - near for number in marks if 0 <= number - near < len(lines))
        found.append(Stretch(log, first.speaker.rank, near, tuple(lines), marked))
    return found


def stretches_of_run(run: Path, incident: Incident, matcher: RowMatcher) -> tuple[list[Stretch], list[str]]:
    """Stretches of what a run's folder has kept of the ranks that an incident is about, and what is missing there.

    The rank that told the cause comes first, then those that are blamed, then those that followed.
    """
    cause = incident.cause
    known: list[SpokenLine] = (
        [] if cause is None else [one for one in (cause.first, *cause.then) if one is not None]
    )
    ranks = [one.rank for one in known]
    ranks += [one.rank for one in incident.culprits]
    ranks += [] if cause is None else [*(one.rank for one in cause.followed), *cause.following_ranks]
    wanted = list(dict.fromkeys(rank for rank in ranks if rank is not None))
    found: list[Stretch] = []
    absent: list[int] = []
    for rank in wanted[:MOST_LOGS]:
        texts = [one.text for one in known if one.rank == rank]
        stretch = _of_rank(run, rank, incident.incarnation, texts, matcher)
        if stretch is None:
            absent.append(rank)
        else:
            found.append(stretch)
    missing: list[str] = []
    if absent:
        missing.append(
            f"no words of rank{'s' if len(absent) > 1 else ''} {fold_ranks(absent)} are in {run}/logs: its folder on "
            "their node may have them, or --log-dir, or they were not kept (--keep-words)"
        )
    if len(wanted) > MOST_LOGS:
        missing.append(f"{len(wanted) - MOST_LOGS} more ranks followed: their words are in {run}/logs")
    return found, missing


def _of_rank(
    run: Path, rank: int, incarnation: int, texts: Sequence[str], matcher: RowMatcher
) -> Stretch | None:
    """What one rank's logs tell best: one of ``texts``, else its first words of a failure, else the end."""
    best: tuple[int, Stretch] | None = None
    for path, most in _kept_files(run / "logs" / f"rank-{rank:05d}", incarnation):
        data, is_whole = _end_of(path, most)
        if not data.strip():
            continue
        lines = [line[:_LINE_BYTES].decode(errors="replace") for line in split_lines(data)]
        lines = lines[:-1] if not lines[-1] else lines
        weight, stretch = _telling(lines, _told(data, rank, matcher), texts)
        begin, shown, marked = stretch
        one = Stretch(str(path.relative_to(run)), rank, begin + 1 if is_whole else 0, shown, marked)
        if best is None or weight < best[0] or (weight == best[0] and not marked):
            best = weight, one
    return best[1] if best else None


def _telling(
    lines: Sequence[str], told: Sequence[Told], texts: Sequence[str]
) -> tuple[int, tuple[int, tuple[str, ...], frozenset[int]]]:
    """A stretch, and its weight: less tells more."""
    own = [one for one in told if one.row.role in _TELLING]
    choices = ([one for one in told if any(_is(one, text) for text in texts)], own, list(told))
    for weight, chosen in enumerate(choices):
        if chosen:
            marks = {one.number - 1 for one in chosen if one.number <= len(lines)}
            begins = chosen[0].begins
            return weight, around(lines, marks, begins - 1 if begins else chosen[0].number - 1)
    begin = max(len(lines) - _END_LINES, 0)
    return len(choices), (begin, tuple(lines[begin:]), frozenset())


def _is(told: Told, text: str) -> bool:
    """Whether it is the line of which an incident has this text: cut, and with secrets blanked."""
    text = text.removesuffix("…").strip()
    return bool(text) and any(text in blanked(line[:_LINE_BYTES]) for line in (told.line, told.text))


def _told(data: bytes, rank: int, matcher: RowMatcher) -> list[Told]:
    listener = Listener(matcher, "", rank)
    listener.take(data)
    return [one for one in listener.words().told if one.row.role not in ("harmless", "note")]


def _kept_files(folder: Path, incarnation: int) -> Iterable[tuple[Path, int]]:
    """The files with the words of an incarnation, in their order, and how many bytes at their end may be its."""
    found: list[tuple[tuple[bool, str, bool], Path, int]] = []
    try:
        names = os.listdir(folder)
    except OSError:
        return ()
    for name in names:
        kept = _KEPT.fullmatch(name)
        if kept is None or (kept["incarnation"] is not None and int(kept["incarnation"]) != incarnation):
            continue
        of_all = kept["incarnation"] is None
        order = (of_all, name.partition(".")[0], kept["end"] is not None)
        found.append((order, folder / name, _MOST_OF_ALL_RUNS_BYTES if of_all else _MOST_BYTES))
    return [(path, most) for _, path, most in sorted(found)]


def _end_of(path: Path, most: int) -> tuple[bytes, bool]:
    """The last bytes of a file from the begin of a line on, and whether they are all; empty where it cannot be read."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(size - most, 0))
            data = file.read(most)
    except OSError:
        return b"", True
    return (data, True) if size <= most else (data.partition(b"\n")[2], False)
