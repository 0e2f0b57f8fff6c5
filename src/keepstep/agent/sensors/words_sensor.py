"""Listens to what this node's ranks write: follows their streams, and tells which lines tell of a failure.

A stream is a memfd of the launcher's, whose pages are freed below the last MiB or so, or a file. What comes faster than
it may be looked at is passed over, and counted.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from keepstep.agent.sensors.late_rows import LateRows
from keepstep.core.told import Told
from keepstep.detect.failure_rows import RowMatcher
from keepstep.detect.listener import Bounds, Listener

logger = logging.getLogger("keepstep.agent")

RANK_BYTES = 256 << 10
"""At most so much of a stream is looked at in one poll, and near the end of what was passed over."""
NODE_BYTES = 1 << 20
"""At most so much of all streams is looked at in one poll."""
LAG_BYTES = 768 << 10
"""Whoever lags by more goes on near the end: what lies further back may be freed at any moment."""
CPU_SHARE = 0.01
"""Share of a core that listening takes in the long run."""
_MOST_CREDIT_S = 0.5  # CPU time that may be saved up, for a start or a failure
_POLL_CPU_S = 0.03
# In the last look at most so much of all streams is looked at.
_LAST_BYTES = 4 << 20
_READ_BYTES = 64 << 10
_REOPEN_S = 1.0
_QUIET_S = 60.0  # time without news of a stream after which it may tell the same again
_FILES_S = 0.1
_FILES_PATIENCE_S = 1.0
_MEMORY = "/proc/"
_SHAPE_BYTES, _TOLD, _LINE_BYTES = (
    12 << 20,
    1024,
    1024,
)  # The first two are of all streams of a node together.


class _Stream:
    """One stream of a rank, read on from where it was left. No descriptor of anybody else's is moved."""

    def __init__(self, rank: int, name: str, begin: int, path: str) -> None:
        self.rank, self.name, self._path = rank, name, path
        self.listener: Listener | None = None
        self.told_s = 0.0  # when it had news last
        self.passed_over = 0  # bytes
        self._file = -1
        self._at = begin
        self._retry_s = 0.0

    def new_bytes(self, now_s: float, most: int = LAG_BYTES) -> int:
        """How many bytes can be read. Where there are more than ``most``, only those near the end are left."""
        if self._file < 0 and not self._open(now_s):
            return 0
        size = os.fstat(self._file).st_size
        if size < self._at:  # a process has opened it anew by its path, as a new file
            self._at = 0
        if size - self._at > most:
            self._pass_over(size - RANK_BYTES - self._at)
        return size - self._at

    def read(self, most: int) -> bytes:
        """The next bytes; those that have been freed are zeros."""
        data = os.pread(self._file, most, self._at)
        self._at += len(data)
        return data

    def close(self) -> None:
        """Let go of it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def _pass_over(self, count: int) -> None:
        if not self.passed_over:
            logger.info(
                "rank %d writes to its %s faster than it is looked at for words of failures",
                self.rank,
                self.name,
            )
        self.passed_over += count
        self._at += count

    def _open(self, now_s: float) -> bool:
        if now_s < self._retry_s:
            return False
        self._retry_s = now_s + _REOPEN_S
        with suppress(OSError):
            file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if stat.S_ISREG(os.fstat(file).st_mode):
                self._file = file
                return True
            os.close(file)
        return False


class _FileStream(_Stream):
    """A stream that is a file. A thread fetches its bytes, because a file server may not answer."""

    def __init__(self, rank: int, name: str, begin: int, path: str) -> None:
        super().__init__(rank, name, begin, path)
        self._fetched: deque[bytes] = deque()
        self._in, self._out = 0, 0  # bytes that the thread has fetched, and that were read

    def fetch(self, now_s: float) -> None:
        """Fetch what is new, as far as there is room."""
        try:
            left = super().new_bytes(now_s)
            while left > 0 and self._in - self._out < RANK_BYTES and (data := super().read(_READ_BYTES)):
                self._fetched.append(data)
                self._in += len(data)
                left -= len(data)
        except OSError:  # the file server knows the file no more
            self.close()

    def new_bytes(self, now_s: float, most: int = LAG_BYTES) -> int:
        """How many bytes were fetched and not read."""
        return self._in - self._out

    def read(self, most: int) -> bytes:
        """Bytes that were fetched, some more or less than ``most``."""
        data = self._fetched.popleft() if self._fetched else b""
        self._out += len(data)
        return data


class _Fetcher:
    """The thread for all files."""

    def __init__(self, files: Sequence[_FileStream]) -> None:
        self._files = files
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keepstep-words", daemon=True)
        if files:
            self._thread.start()

    def close(self) -> None:
        """Have all fetched that is there, if that does not take too long, and nothing after that."""
        self._closed.set()
        if self._files:
            self._thread.join(_FILES_PATIENCE_S)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._closed.wait(_FILES_S)
            for file in self._files:
                file.fetch(time.monotonic())


class WordsSensor:
    """The ears for all ranks of a node."""

    def __init__(
        self,
        streams: Mapping[int, Sequence[tuple[str, int, str]]],
        rows: LateRows,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """``streams``: names, beginnings and paths by rank. ``cpu_s()``: the CPU time that this thread has taken."""
        self._rows, self._cpu_s = rows, cpu_s
        self._streams = [
            (_Stream if path.startswith(_MEMORY) else _FileStream)(rank, name, begin, path)
            for rank, several in sorted(streams.items())
            for name, begin, path in several
        ]
        self._fetcher = _Fetcher([one for one in self._streams if isinstance(one, _FileStream)])
        count = max(len(self._streams), 1)
        self._bounds = Bounds(_LINE_BYTES, _SHAPE_BYTES // count, max(_TOLD // count, 16))
        self._last_bytes = min(RANK_BYTES, _LAST_BYTES // count)
        self._credit_s, self._credited_s = _MOST_CREDIT_S, 0.0
        self._turn = 0

    @property
    def passed_over(self) -> int:
        """How many bytes were not looked at, because they came too fast."""
        return sum(stream.passed_over for stream in self._streams)

    def look(self, now_s: float, *, last: bool = False) -> list[tuple[int, Told]]:
        """What was told since the last look, with the ranks that wrote it.

        ``last``: nothing follows, so that the end of each stream is read, and a line without its end counts, too.
        """
        most = self._last_bytes if last else LAG_BYTES
        if last:
            self._fetcher.close()
        self._turn += 1
        turn = self._turn % max(len(self._streams), 1)
        in_turn = self._streams[turn:] + self._streams[:turn]
        grown = {stream: size for stream in in_turn if (size := stream.new_bytes(now_s, most)) > 0}
        matcher = self._rows.get(wait=last) if grown else None
        if matcher is not None:
            self._listen(grown, matcher, now_s, last=last)
        heard = (
            list(grown) if not last else [stream for stream in self._streams if stream.listener is not None]
        )
        return [(stream.rank, told) for stream in heard for told in self._news(stream, now_s, last=last)]

    def close(self) -> None:
        """Let go of all streams."""
        self._fetcher.close()
        for stream in self._streams:
            stream.close()

    def _listen(self, grown: Mapping[_Stream, int], matcher: RowMatcher, now_s: float, *, last: bool) -> None:
        earned_s = CPU_SHARE * (now_s - self._credited_s) if self._credited_s else 0.0
        self._credit_s, self._credited_s = min(self._credit_s + earned_s, _MOST_CREDIT_S), now_s
        spendable_s = min(self._credit_s, _POLL_CPU_S)
        began_s = self._cpu_s()
        spent_s, node_left = 0.0, NODE_BYTES
        for stream, size in grown.items():
            if stream.listener is None:
                stream.listener = Listener(matcher, stream.name, stream.rank, self._bounds)
            left = min(size, self._last_bytes if last else min(RANK_BYTES, node_left))
            while left > 0 and (last or spent_s < spendable_s):
                data = stream.read(min(left, _READ_BYTES))
                if not data:
                    break
                stream.listener.take(data.replace(b"\0", b"") if b"\0" in data else data)
                left -= len(data)
                node_left -= len(data)
                spent_s = self._cpu_s() - began_s
        self._credit_s -= spent_s

    def _news(self, stream: _Stream, now_s: float, *, last: bool) -> tuple[Told, ...]:
        if stream.listener is None:
            return ()
        news = stream.listener.fresh(last=last)
        if news:
            stream.told_s = now_s
        elif stream.told_s and now_s - stream.told_s > _QUIET_S:
            stream.listener.forget()
            stream.told_s = 0.0
        return news
