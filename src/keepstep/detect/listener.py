"""From the words of a job to facts: lines in, what they tell of a failure out. Bounded in time and memory.

A line's digits are folded, which gives its shape. Only a shape that was not seen before is looked at; most are of no
interest, and all lines that share one are then only counted. Lines of a shape that may tell of a failure are looked at
each, up to a bound: they differ in ranks, numbers and addresses.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, replace

from keepstep.core.lost_connection import tells_of_a_timeout, tells_of_another
from keepstep.core.told import FEW_STEPS, NewLine, Row, Speaker, Told, Words
from keepstep.detect.failure_rows import RowMatcher
from keepstep.detect.prefixes import Spoken, spoken

FOLD = bytes.maketrans(b"123456789", b"0" * 9)
_LOOKED_AT_BYTES = 4096
_MOST_SHAPES = 60_000
# So many lines of one shape are looked at, and so many in vain; later ones are only counted.
_MOST_LOOKS = 2000
_MOST_FRUITLESS = 64
_MOST_LABELS = 4096
_MOST_RANK = 1 << 20
# Lines of one error stand at most this many lines of their speaker apart.
_NEAR = 40
# So many lines before and after an error of storage may tell what it was about.
_BESIDE = 4
_LONG_TRACEBACK_LINES = 400
# Of so many lines of new shapes, the last ones, so many bytes are kept: one of them may be a cause that no row knows.
_MOST_NEW = 64
_NEW_BYTES = 1024

# The value of a shape is one of these, or how many more of its lines are looked at.
_DULL, _PROGRESS = 0, -1
_NOTHING = frozenset((_DULL, _PROGRESS))

_SIGNS = ("rror", "xception", "raceback", "terminate called", "what():", "(local_rank:", "host      : ")
_HEADER = re.compile(r"(?:Exception Group )?Traceback \(most recent call last\):$")
_CHAINED = re.compile(
    r"The above exception was the direct cause of the following exception|"
    r"During handling of the above exception, another exception occurred"
)
_ERROR = re.compile(
    r"(?P<kind>(?:[A-Za-z_]\w*\.){0,8}[A-Z]\w{0,80}?(?:Error|Exception|Exit|Interrupt|Expired|Timeout|NotFound|NotMet|"
    r"Failure|Fault|Disconnected|Refused|Denied|Mismatch)(?:\(\w+\))?)(?:: ?(?P<said>.*)|$)"
)
_ERROR_BELOW = re.compile(r"(?P<kind>(?:[A-Za-z_]\w*\.){0,8}[A-Za-z_]\w{2,80})(?:: (?P<said>.*)|$)")
# Without a message, only what is spelled like a type: other words are the rest of a line that was wrapped.
_TYPE = re.compile(r"(?:\w+\.)*(?:[A-Z]\w*|timeout|error|[a-z]*error)(?:: |$)")
# Tries are told at level INFO; the last one tells that all were in vain.
_TRIED = re.compile(r"\bretrying \((\d{1,4})/(\d{1,4})\)")
_PASSED_ON = re.compile(r"Caught \w+ in |(?:[\w.]*\.)?(?:RayTaskError|ProcessRaisedException)\b|.*ray::")
# Libraries that call a warning what ends the process that says it: NCCL, and XLA in JAX.
_WARNS_OF_FAILURE = re.compile(r"NCCL WARN|\bexternal/\S{0,60}xla/.{0,120}unable to create StreamExecutor")
# Code that a traceback shows, and frames of C++, may hold any words.
_FRAME = re.compile(
    r"[│╭╰❱]|File \"|raise |frame #\d|#\d{1,3} +0x|\^{2,}|\[0x[0-9a-f]+\]|assert |return |@ +0x"
)
_SUMMARY = re.compile(r"(?:rank +: (?P<rank>\d{1,7}) \(local_rank: \d+\)|host {6}: (?P<host>[\w.-]{1,253})$)")
_ENDED = re.compile(r"(?:exitcode|traceback) +: ")
STEPS = re.compile(
    r"(?i)\b(?:iteration|iter|step|global_step|epoch|batch)\b\W{0,3}\d|it/s\]|s/it\]|\bloss\b\W{0,3}\d"
)
"""What a line of progress has: an iteration, a bar, a loss."""

UNKNOWN_ERROR = Row(
    "python-error", (), (), "exception", "user", "exception", "an error of the program", "speaker",
    "read the traceback: no row of the tables knows this error",
)  # fmt: skip
UNKNOWN_ABORT = Row(
    "cpp-error", (), (), "exception", "user", "exception", "an error in native code", "speaker",
    "read what() and the frames below it: no row of the tables knows this error",
)  # fmt: skip
_TRACEBACK = Row("traceback", (), (), "note", "other", "traceback", "a traceback", "speaker")
_LOST = Row(
    "lost-connection", (), (), "echo", "other", "echo-only", "a connection to another rank is lost", "nobody"
)
_WAITED = Row(
    "waited-in-vain",
    (),
    (),
    "timeout",
    "other",
    "timeout-only",
    "another rank was waited for in vain",
    "nobody",
)
GENERAL_ROWS = (UNKNOWN_ERROR, UNKNOWN_ABORT, _TRACEBACK, _LOST, _WAITED)
"""Rows that no table has: for errors that no row of them knows."""


@dataclass(slots=True)
class _State:
    """Where a speaker is: in which error, and whether frames of a traceback or C++'s ``what()`` are awaited."""

    block: int
    last: int  # the number of the line that it said last
    begins: int = 0  # the number of the line with the traceback's header
    in_traceback: bool = False
    chained: bool = False
    ignored: bool = False  # Python has said that it ignores the error that follows


@dataclass(slots=True)
class _Kept:
    told: Told
    progress: int  # how many lines of progress came before it
    last: int  # how many lines of progress came before the last line that told the same
    count: int = 1
    survived: int = 0
    recent: int = 1


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much a listener keeps.

    Attributes:
        line_bytes: of a line, so that it can be shown.
        shape_bytes: of shapes; with more, all of them are forgotten.
        told: lines that tell of a failure; what comes later is told once for each row, up to as many more.
    """

    line_bytes: int = 32_768
    shape_bytes: int = 24 << 20
    told: int = 4096


def split_lines(data: bytes) -> list[bytes]:
    """The lines of some bytes, the last without its end. Carriage returns, as in progress bars, end lines, too."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return data.split(b"\n")


def _of_another(text: str) -> Row | None:
    """The row of an error that only tells of another rank; None where it is about the program's own."""
    if not tells_of_another(text):
        return None
    return _WAITED if tells_of_a_timeout(text) else _LOST


class Listener:
    """Takes the bytes of one log in their order; `words` says what they told, `fresh` what they told lately."""

    def __init__(
        self, matcher: RowMatcher, source: str = "", rank: int | None = None, bounds: Bounds | None = None
    ) -> None:
        """``source``: the log's name. ``rank``: who wrote it, where all of it is of one rank."""
        self._matcher = matcher
        self._bounds = bounds or Bounds()
        self._source = source
        self._speaker = Speaker(rank=rank, label=f"rank {rank}" if rank is not None else "")
        self._rest = b""
        self._lines = 0
        self._shapes: dict[bytes, int] = {b"": _DULL}
        self._shape_bytes = 0
        self._states: dict[str, _State] = {}
        self._blocks = 0
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self._fresh: list[_Kept] = []
        self._progress = 0
        self._heard: set[int] = set() if rank is None else {rank}
        self._summary: dict[str, str] = {}  # rank and node of which torchrun's table tells
        self._frames_until = -1  # the number of the last line that may be a frame of a traceback
        # A new line, its number, lines of progress before it, lines since the first of these and how many were new.
        self._new: deque[tuple[bytes, int, int, int, int]] = deque(maxlen=_MOST_NEW)
        self._first_progress = 0
        self._settled_new = 0
        self._stopped_at = -1  # how many lines of progress there were when something was told
        # Lines that are taken now, and how many came before them.
        self._chunk: list[bytes] = []
        self._before = 0

    def take(self, data: bytes) -> None:
        """Take some bytes; a line may go on in the next ones."""
        if self._rest:
            data = self._rest + data
        *shapes, _ = split_lines(data.translate(FOLD))
        known = self._shapes
        states = list(map(known.get, shapes))
        # In nearly all polls no line tells anything, so that the lines themselves are not needed.
        if _NOTHING.issuperset(states):
            self._lines += len(states)
            self._progress += states.count(_PROGRESS)
            self._keep_rest(data[max(data.rfind(b"\n"), data.rfind(b"\r")) + 1 :])
            return
        *lines, rest = split_lines(data)
        self._keep_rest(rest)
        self._chunk, self._before = lines, self._lines
        for line, shape in zip(lines, shapes, strict=True):
            self._lines += 1
            state = known.get(shape)
            if state == _DULL:
                continue
            if state == _PROGRESS:
                self._progress += 1
            elif line:
                self._look(line, shape[:_LOOKED_AT_BYTES] if len(shape) > _LOOKED_AT_BYTES else shape)
        self._chunk = []

    def _keep_rest(self, rest: bytes) -> None:
        self._rest = rest[: max(self._bounds.line_bytes, _LOOKED_AT_BYTES)]

    def words(self) -> Words:
        """What all lines told that were taken so far, the last without its end, too."""
        self._end_line()
        told = tuple(map(self._so_far, self._kept.values()))
        new = tuple(self._new_line(*one) for one in self._new)
        return Words(told, self._lines, frozenset(self._heard), self._progress, new)

    def fresh(self, *, last: bool = False) -> tuple[Told, ...]:
        """What was told since the last such call, for the first time; ``last``: by the line without its end, too."""
        if last:
            self._end_line()
        told = tuple(map(self._so_far, self._fresh))
        self._fresh.clear()
        return told

    def forget(self) -> None:
        """Forget what was told: when it is told again, it is `fresh` again."""
        self._kept.clear()
        self._fresh.clear()

    def _end_line(self) -> None:
        if self._rest:
            self.take(b"\n")

    def _so_far(self, one: _Kept) -> Told:
        went_on = self._progress - one.progress
        return replace(
            one.told, count=one.count, went_on=went_on, survived=one.survived, recent=one.recent
        )  # fmt: skip

    def _look(self, line: bytes, shape: bytes) -> None:
        # A long line comes with a shape that was cut, so that `take` has not found it.
        left = self._shapes.get(shape)
        is_new = left is None
        if left is None:
            self._shape_bytes += len(shape) + 100
            if len(self._shapes) >= _MOST_SHAPES or self._shape_bytes > self._bounds.shape_bytes:
                self._shapes.clear()
                self._shapes[b""] = _DULL
                self._shape_bytes = 0
            left = _MOST_LOOKS
        elif left <= _DULL:
            self._progress += left == _PROGRESS
            return
        text = line[:_LOOKED_AT_BYTES].decode(errors="replace")
        candidates = self._matcher.candidates(text)
        trace = self._lines <= self._frames_until
        if not candidates and not trace and not any(sign in text for sign in _SIGNS):
            self._shapes[shape] = self._dull(text)
            if is_new and self._shapes[shape] == _DULL:
                self._note(line)
            return
        said = spoken(text)
        if self._tells(said, candidates, line, shape):
            self._shapes[shape] = left - 1 if left > 1 else _DULL
        elif (candidates or trace) and b"0" in shape and left > _MOST_LOOKS - _MOST_FRUITLESS:
            self._shapes[shape] = left - 1
            if not candidates and STEPS.search(text):
                self._shapes[shape] = self._dull(text)
            elif is_new and not trace:
                self._note(line)
        else:
            self._shapes[shape] = self._dull(text)
            if is_new and not trace and self._shapes[shape] == _DULL:
                self._note(line)

    def _note(self, line: bytes) -> None:
        """Keep a new line, unless something was told and the job made no progress since."""
        if self._stopped_at == self._progress:
            return
        settled = self._lines - self._first_progress if self._first_progress else 0
        self._settled_new += settled > 0
        self._new.append((line[:_NEW_BYTES], self._lines, self._progress, settled, self._settled_new))

    def _new_line(self, line: bytes, number: int, progress: int, settled: int, new: int) -> NewLine:
        whole = line.decode(errors="replace").strip()
        said = spoken(whole)
        speaker = said.speaker
        if self._speaker.rank is not None:
            speaker = replace(speaker, rank=self._speaker.rank, label=self._speaker.label)
        return NewLine(
            whole, said.text, number, self._source, said.time_s, speaker, said.level, progress, settled, new
        )  # fmt: skip

    def _dull(self, text: str) -> int:
        """The value of a shape that tells of no failure."""
        if STEPS.search(text):
            self._progress += 1
            self._first_progress = self._first_progress or self._lines
            return _PROGRESS
        return _DULL

    def _tells(self, said: Spoken, candidates: list[tuple[int, int]], line: bytes, shape: bytes) -> bool:
        """Keep what a line tells of a failure; whether it, or another line of its shape, may tell something."""
        text = said.text
        speaker = said.speaker
        if self._speaker.rank is not None:
            speaker = replace(speaker, rank=self._speaker.rank, label=self._speaker.label)
        if speaker.rank is not None and speaker.rank < _MOST_RANK:
            self._heard.add(speaker.rank)
        state = self._state(speaker.label)
        if _HEADER.search(text):
            if not state.chained:
                self._blocks += 1
                state.block, state.begins = self._blocks, self._lines
            state.in_traceback, state.chained, state.last = True, False, self._lines
            self._frames_until = self._lines + _LONG_TRACEBACK_LINES
            self._keep(_TRACEBACK, said, speaker, line, b"", {}, state)
            return True
        if _CHAINED.match(text):
            state.chained, state.in_traceback = True, False
            return True
        if found := _SUMMARY.match(text):
            # A process has its host first.
            self._summary = (
                {"node": found["host"]} if found["host"] else {**self._summary, "rank": found["rank"]}
            )
            return True
        if said.level == "info" and said.boot_s is None:
            tried = _TRIED.search(text)
            if tried is None or tried[1] != tried[2]:
                return tried is not None
        if _FRAME.match(text) or (state.in_traceback and said.indent > 2):
            return False
        row, places = self._row(said, candidates, state)
        if row is None:
            return False
        if row.role == "harmless":
            state.ignored = state.ignored or text.startswith("Exception ignored in")
            return True
        if state.ignored and row.role == "exception":
            state.ignored = False
            return True
        if row.role == "outcome" and "rank" not in places and "rank" in self._summary and _ENDED.match(text):
            places = {**places, **self._summary}
        self._keep(row, said, speaker, line, shape, places, state)
        return True

    def _row(
        self, said: Spoken, candidates: list[tuple[int, int]], state: _State
    ) -> tuple[Row | None, dict[str, str]]:
        text = said.text
        error = _ERROR.match(text) if not state.in_traceback else _ERROR_BELOW.match(text)
        if said.indent and (not state.in_traceback or said.indent > 2):
            error = None
        if error and (error["kind"].endswith("Warning") or (": " not in text and not _TYPE.match(text))):
            error = None
        if found := self._matcher.match(text, candidates):
            row, places = found
            if row.role == "exception" and (error is None or said.level == "warning"):
                return None, {}
            if error is not None:
                state.in_traceback = False
            return (_of_another(text) or row if row.role == "exception" else row), places
        if error is not None and said.level != "warning":
            state.in_traceback = False
            if _PASSED_ON.match(error["said"] or "") or _PASSED_ON.match(text):
                return None, {}
            return _of_another(text) or UNKNOWN_ERROR, {}
        if text.startswith("what():"):
            return UNKNOWN_ABORT, {}
        return None, {}

    def _state(self, label: str) -> _State:
        state = self._states.get(label)
        if state is None:
            if len(self._states) >= _MOST_LABELS:
                self._states.clear()
            self._blocks += 1
            state = self._states[label] = _State(self._blocks, self._lines)
        elif self._lines - state.last > _NEAR * max(1, len(self._states)):
            self._blocks += 1
            state.block, state.begins, state.in_traceback, state.chained = self._blocks, 0, False, False
        return state

    def _keep(
        self,
        row: Row,
        said: Spoken,
        speaker: Speaker,
        line: bytes,
        shape: bytes,
        places: dict[str, str],
        state: _State,
    ) -> None:
        state.last = self._lines
        key = (row.name, speaker.label, shape, *places.values())
        kept = self._kept.get(key)
        if kept is None and len(self._kept) >= self._bounds.told:
            key = (row.name,)
            kept = self._kept.get(key)
            if kept is None and len(self._kept) >= 2 * self._bounds.told:
                return
        if row.role != "note":
            self._stopped_at = self._progress
        if kept is not None:
            kept.count += 1
            goes_on = self._progress - kept.last > FEW_STEPS * max(1, len(self._heard))
            kept.last = self._progress
            if not goes_on:
                kept.recent += 1
                return
            kept.survived, kept.recent, kept.progress = kept.survived + 1, 1, self._progress
            kept.told = self._told(row, said, speaker, line, places, state)
            return
        told = self._told(row, said, speaker, line, places, state)
        self._kept[key] = _Kept(told, self._progress, self._progress)
        self._fresh.append(self._kept[key])

    def _told(
        self, row: Row, said: Spoken, speaker: Speaker, line: bytes, places: dict[str, str], state: _State
    ) -> Told:
        whole = line[: self._bounds.line_bytes].decode(errors="replace").strip()
        warned = said.level == "warning" and not _WARNS_OF_FAILURE.search(whole)
        beside = self._beside(state.begins, said.speaker.label) if row.blames == "path" else ()
        return Told(
            row, whole, said.text, self._lines, self._source, said.time_s, said.boot_s, speaker, state.block,
            state.begins, places, warned, beside=beside,
        )  # fmt: skip

    def _beside(self, begins: int, label: str) -> tuple[str, ...]:
        """The lines with a path right after the line that is looked at, and before it or before its traceback."""
        at = self._lines - self._before - 1
        begin = min(at, begins - self._before - 1) if begins > self._before else at
        around = [
            *self._chunk[at + 1 : at + 1 + _BESIDE],
            *reversed(self._chunk[max(0, begin - _BESIDE) : begin]),
        ]
        told = (spoken(line[:_NEW_BYTES].decode(errors="replace")) for line in around if b"/" in line)
        return tuple(one.text for one in told if one.speaker.label in (label, ""))
