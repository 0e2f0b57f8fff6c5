"""The runs of a job in the lines of its log: which iteration is of which run, and what ranks tell of themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from keepstep.traces import log_formats, rank_timers, watchdog
from keepstep.traces.log_formats import FORMATS, Bar, Format, Reading, reading
from keepstep.traces.log_text import LABEL_WITHIN, plain_text, speaker
from keepstep.traces.progress_bars import step_times
from keepstep.traces.rank_timers import RankTimers
from keepstep.traces.watchdog import Timeouts, WatchdogWords

MOST_READINGS = 100_000  # iterations, of all ranks together, that are used: a detector takes 0.1 ms each
_LEAST_READINGS = 12  # a format with fewer is not preferred to one that the log has more of
_NEARBY = 4  # places by which lines of several writers may be out of order
_AT_THE_END = 0.9  # share of a bar from which it is at its end
_BEGIN = re.compile(rb"before the start of training step|using world size:|raining starts at step")
_WORLD = re.compile(rb"(?:using world[ _-]size|WORLD_SIZE)\W{1,3}(\d{1,6})\b")
_HEARD = re.compile(rb"\[rank(\d{1,7})\]")
_BEGIN_MARKS = (b"start of training step", b"using world", b"raining starts at", b"WORLD_SIZE")

MARKS = (*_BEGIN_MARKS, *log_formats.MARKS, *watchdog.MARKS, *rank_timers.MARKS)
"""Lines without one of these are about something else, as most lines of a log."""


@dataclass(frozen=True, slots=True)
class LoggedIteration:
    """``seconds`` is the inverse of the speed where the log has speeds; ``batch`` (samples) is 0 where not told."""

    number: int
    seconds: float
    batch: int = 0


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """One run of a job, from its begin to its end or its next begin.

    Attributes:
        iterations: ascending.
        by_rank: by iteration and rank, the times that ranks have for themselves, in seconds or as in ``iterations``.
        timeouts: what NCCL's watchdogs said, if operations timed out.
    """

    iterations: tuple[LoggedIteration, ...]
    by_rank: Mapping[int, Mapping[int, float]] = field(default_factory=dict[int, Mapping[int, float]])
    timeouts: Timeouts | None = None


@dataclass(slots=True)
class _Writer:
    """The readings of one format by one writer, by run and iteration."""

    rank: int | None
    run: int
    runs: dict[int, dict[int, Reading]] = field(default_factory=dict[int, dict[int, Reading]])
    last: int = -1
    laps: int = 0  # how often a bar that tells no epoch has begun again at its end
    several: bool = False  # more than one process writes these lines: they are told twice, or out of order


class LogRuns:
    """Takes the lines of a log, one after the other, and tells its runs apart.

    Attributes:
        room: how many more readings are kept.
        world: the number of ranks as the log says it; 0 where it does not.
    """

    def __init__(self) -> None:
        self.room = MOST_READINGS
        self.world = 0
        self._run = 0
        self._fresh = True  # nothing has been told of this run yet
        self._number = 0  # the iteration that was told last
        self._writers: dict[tuple[Format, str, int], _Writer] = {}
        self._timers: dict[int, RankTimers] = {0: RankTimers()}
        self._words: dict[int, WatchdogWords] = {0: WatchdogWords()}

    @property
    def empty(self) -> bool:
        """Whether there was neither an iteration nor a timeout."""
        return not self._writers and all(words.found() is None for words in self._words.values())

    def take(self, line: bytes) -> None:
        """Take a line, without its end."""
        if b"[rank" in line and (label := _HEARD.search(line, 0, LABEL_WITHIN)):
            self._words[self._run].hear(int(label[1]))
        if any(mark in line for mark in MARKS):
            self._take_marked(line)
        elif self._timers[self._run].in_block:
            self._timers[self._run].take(plain_text(line), self._number)

    def _take_marked(self, line: bytes) -> None:
        if _BEGIN.search(line) and not self._fresh:
            self._begin()
        if world := _WORLD.search(line):
            self.world = int(world[1])
        text = plain_text(line)
        if any(mark in line for mark in log_formats.MARKS) and (found := reading(text)) is not None:
            self._read(found, *speaker(text))
        elif any(mark in line for mark in watchdog.MARKS) and self._words[self._run].take(text):
            self._fresh = False
        else:
            self._timers[self._run].take(text, self._number)

    def _begin(self) -> None:
        self._run += 1
        self._fresh = True
        self._timers[self._run] = RankTimers()
        self._words[self._run] = WatchdogWords()

    def _read(self, found: Reading, label: str, rank: int | None) -> None:
        if self.room == 0:
            return
        bar = found.bar
        # Bars of other lengths are other loops, such as evaluations; epochs count on.
        key = found.format, label, bar.total if bar else 0
        writer = self._writers.setdefault(key, _Writer(rank, self._run))
        own = writer.runs.setdefault(writer.run, {})
        number = found.number
        if bar:
            bar = replace(bar, epoch=bar.epoch + _lap(writer, number, bar))
            found = replace(found, bar=bar)
            number += bar.epoch * bar.total
            if number < writer.last - _NEARBY:
                writer.run, writer.last, writer.laps = writer.run + 1, number, 0
        elif self._is_anew(writer, own, number, found):
            if writer.run == self._run:
                self._begin()
            writer.run, writer.last, writer.several = self._run, number, False
        if number not in (own := writer.runs.setdefault(writer.run, {})):
            self.room -= 1
            own[number] = found
            writer.last = max(writer.last, number)
        self._number, self._fresh = number, False

    def _is_anew(self, writer: _Writer, own: Mapping[int, Reading], number: int, found: Reading) -> bool:
        """Whether the job has begun anew before this line; a line that is there twice is no new begin."""
        if not own:
            return False
        if self._fresh and writer.run < self._run:
            return True
        if number > writer.last:
            return writer.run < self._run and found.number <= self._number
        if number in own and abs(own[number].seconds - found.seconds) <= 1e-9 * found.seconds:
            return False
        if writer.last - number > _NEARBY or (number < next(iter(own)) and len(own) > _NEARBY):
            return True
        # So little back, it may be the line of another process, if there are such, or if it is too early to tell.
        if number in own and number < writer.last and not writer.several and len(own) >= _NEARBY:
            return True
        writer.several = True
        return False

    def runs(self) -> tuple[Format | None, list[LoggedRun]]:
        """The format that was chosen, and the runs in which something was told."""
        counts: dict[Format, int] = {}
        for (name, _, _), writer in self._writers.items():
            counts[name] = max(counts.get(name, 0), sum(map(len, writer.runs.values())))
        chosen = min(
            counts,
            key=lambda name: (counts[name] < min(_LEAST_READINGS, max(counts.values())), FORMATS.index(name)),
            default=None,
        )
        writers = [writer for (name, _, _), writer in self._writers.items() if name == chosen]
        if chosen == "progress bar":
            writers = [max(writers, key=lambda one: max(map(len, one.runs.values())))]
        found: list[LoggedRun] = []
        seen: set[tuple[LoggedIteration, ...]] = set()
        for run in sorted({*self._words, *(run for writer in writers for run in writer.runs)}):
            iterations = tuple(_of_job(writer.runs.get(run, {}) for writer in writers))
            words = self._words.get(run)
            timeouts = words.found() if words else None
            if timeouts is None and (not iterations or iterations in seen):
                continue  # a log that was appended to itself
            seen.add(iterations)
            found.append(LoggedRun(iterations, self._by_rank(run, writers), timeouts))
        return chosen, found

    def _by_rank(self, run: int, writers: Iterable[_Writer]) -> Mapping[int, Mapping[int, float]]:
        """The timers of ranks where they are logged; else the iterations of several ranks that print theirs."""
        timers = self._timers.get(run)
        if timers and timers.seconds:
            return timers.seconds
        found: dict[int, dict[int, float]] = {}
        for writer in writers:
            for number, one in writer.runs.get(run, {}).items():
                if writer.rank is not None and one.bar is None:
                    found.setdefault(number, {})[writer.rank] = one.seconds
        return {number: by_rank for number, by_rank in found.items() if len(by_rank) > 1}


def _lap(writer: _Writer, step: int, bar: Bar) -> int:
    """How many times a bar that tells no epoch has begun again, as tqdm's does in every epoch, until this line of it.

    One that begins again before its end is the bar of another run.
    """
    within = writer.last - writer.laps * bar.total
    if bar.epoch == 0 and _AT_THE_END * bar.total <= within <= bar.total and step <= bar.total / 2:
        writer.laps += 1
    elif writer.laps and within <= bar.total - _AT_THE_END * bar.total and step >= _AT_THE_END * bar.total:
        return writer.laps - 1  # another process is not yet as far
    return writer.laps


def _of_job(told: Iterable[Mapping[int, Reading]]) -> Iterator[LoggedIteration]:
    """The iterations of the job, ascending: where several ranks tell theirs, the slowest is the job's."""
    slowest: dict[int, Reading] = {}
    for own in told:
        for number, one in own.items():
            if number not in slowest or one.seconds > slowest[number].seconds:
                slowest[number] = one
    bars = [(number, one.bar) for number, one in sorted(slowest.items()) if one.bar is not None]
    if bars:
        yield from (LoggedIteration(number, seconds) for number, seconds in step_times(bars))
        return
    batches = _batches(slowest)
    for number, one in sorted(slowest.items()):
        yield LoggedIteration(number, one.seconds, batches[number])


def _batches(told: Mapping[int, Reading]) -> dict[int, int]:
    """The batch size of each iteration: as it is told, or by how much the samples consumed have grown since the last.

    That growth is a batch size only where most iterations have that of the one before.
    """
    sizes = {number: one.batch for number, one in sorted(told.items())}
    if any(sizes.values()) or not all(one.consumed for one in told.values()) or len(told) < 2:
        return sizes
    grown = [
        max(round((told[number].consumed - told[last].consumed) / (number - last)), 0)
        for last, number in pairwise(sizes)
    ]
    if 2 * sum(size == before for before, size in pairwise(grown)) < len(grown):
        return sizes
    return dict(zip(sizes, [grown[0], *grown], strict=True))
