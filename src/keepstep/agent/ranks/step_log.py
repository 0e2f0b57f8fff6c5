"""Writes ``iterations.jsonl``: one line per finished step of the node, in a file below 64 MiB and its predecessor."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Collection
from pathlib import Path

from keepstep.core.errors import UnsafePathError
from keepstep.core.own_folders import make_folder, open_file
from keepstep.core.summary import IterationSummary

LIMIT_BYTES = 64 << 20
_MOST_WAITING_BYTES = 4 << 20  # Newest lines that are kept while the file cannot be written.
_TAIL_BYTES = 1 << 16
_STEPS_OPEN = 16
_FORMAT = '"%d":{"t":%.6f,"d":%.6f,"self":%.6f,"blocked":%.6f,"eval":%s,"ckpt":%s%s}'
_SAME_S = 1e-5  # largest difference of two times that count as the same; times are written in microseconds


class StepLog:
    """Collects the iterations of the node's ranks, and writes a step once all ranks or many later steps have come.

    A restarted agent goes on after the last line in the file.
    """

    def __init__(self, path: Path, ranks: Collection[int], limit_bytes: int = LIMIT_BYTES) -> None:
        self._path, self._ranks, self._limit = path, len(ranks), limit_bytes
        self._open: dict[int, dict[int, str]] = {}  # the text of each rank, by step and rank
        self._file, self._size = -1, 0  # descriptor, and bytes of the file
        self._lines: deque[bytes] = deque()  # not in the file yet
        self._waiting = 0  # bytes of them
        self._incarnation = 0
        self.trouble = ""  # why they cannot be written; "": they can
        self._written_to = _last_times(path)
        try:
            self._open_file()
        except UnsafePathError:
            raise
        except OSError as error:
            self.trouble = error.strerror

    def claimed(self, rank: int, began_unix_s: float, now_unix_s: float, incarnation: int = 0) -> None:
        """Note when the rank's process began to write, and the time now, by the clock of its iterations.

        Steps outside of that are of another process: the clock may have been set back since, and its steps would
        be taken for written. ``incarnation``: the lines from now on are of it.
        """
        self._incarnation = max(self._incarnation, incarnation)
        if not began_unix_s <= self._written_to.get(rank, 0.0) <= now_unix_s:
            self._written_to.pop(rank, None)

    def add(self, iteration: IterationSummary, start_unix_s: float, together: int = 1) -> None:
        """Take one iteration, unless an earlier agent has written it already.

        ``together``: of how many iterations, this one the last, it has the mean times.
        """
        rank = iteration.rank
        if start_unix_s <= self._written_to.get(rank, 0.0) + _SAME_S:
            return
        step = self._open.setdefault(iteration.step, {})
        if rank in step:  # the job was restarted, and the open steps belong to the last incarnation
            self.flush()
            step = self._open.setdefault(iteration.step, {})
        # Of numbers only: in a fifth of the time that `json` takes.
        step[rank] = _FORMAT % (
            rank,
            start_unix_s,
            iteration.duration_s,
            iteration.self_s,
            iteration.blocked_s,
            f"{iteration.evaluation_s:.6f}" if iteration.evaluation_s else "0.0",
            f"{iteration.checkpoint_s:.6f}" if iteration.checkpoint_s else "0.0",
            f',"n":{together}' if together > 1 else "",
        )
        if len(step) == self._ranks:
            self._write_until(iteration.step)
        elif len(self._open) > _STEPS_OPEN:
            self._write_until(min(self._open))

    def flush(self) -> None:
        """Write every open step with the ranks that have come so far."""
        if self._open:
            self._write_until(max(self._open))

    def sync(self) -> None:
        """Write the lines to the file. What does not go there, as on a full disk, is kept for the next time."""
        try:
            while self._lines:
                self._write_line()
            self.trouble = ""
        except OSError as error:
            self.trouble = error.strerror

    def close(self) -> None:
        self.flush()
        self.sync()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write_line(self) -> None:
        line = self._lines[0]
        if self._size + len(line) > self._limit:
            self._rotate()
        self._open_file()
        written = os.write(self._file, line)
        if written < len(line):
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(line)
        self._lines.popleft()
        self._waiting -= len(line)

    def _write_until(self, last: int) -> None:
        for step in sorted(number for number in self._open if number <= last):
            ranks = ",".join(self._open.pop(step).values())
            incarnation = f',"inc":{self._incarnation}' if self._incarnation else ""
            self._lines.append(f'{{"step":{step}{incarnation},"ranks":{{{ranks}}}}}\n'.encode())
            self._waiting += len(self._lines[-1])
            while self._waiting > _MOST_WAITING_BYTES:
                self._waiting -= len(self._lines.popleft())

    def _open_file(self) -> None:
        if self._file < 0:
            make_folder(self._path.parent)
            self._file = open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._size = os.fstat(self._file).st_size

    def _rotate(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        os.replace(self._path, self._path.with_suffix(".1.jsonl"))


def _last_times(path: Path) -> dict[int, float]:
    """The start of the last step in the file, by rank. An incomplete line at the end is removed."""
    try:
        with os.fdopen(open_file(path, os.O_RDWR), "r+b") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _TAIL_BYTES))
            tail = file.read()
            whole, _, rest = tail.rpartition(b"\n")
            if rest:
                file.truncate(end - len(rest))
    except OSError:
        return {}
    times: dict[int, float] = {}
    for line in whole.split(b"\n")[1 if end > _TAIL_BYTES else 0 :]:
        for rank, start_s in _times_in(line).items():
            times[rank] = max(times.get(rank, 0.0), start_s)
    return times


def _times_in(line: bytes) -> dict[int, float]:
    """The start of the step in a line by rank; empty if it is not a line of this log."""
    try:
        return {int(rank): float(found["t"]) for rank, found in json.loads(line)["ranks"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
