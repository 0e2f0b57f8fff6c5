"""Who said some texts, and when: one pass over logs, for what is new in one rank or near the end.

As in `listener`, digits are folded, and a dict knows the shapes that were seen. A text is looked for without its
prefixes and without the values of numbers, so that logs with other prefixes can be compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from keepstep.core.told import Phase, Seen, Speaker, like
from keepstep.detect.listener import FOLD, STEPS, split_lines
from keepstep.detect.prefixes import spoken

_MOST_SHAPES = 60_000
_MOST_SPEAKERS = 4096
_LOOKED_AT_BYTES = 1024
# Of so many lines of each log, and of all, it is counted who wrote them.
_COUNTED_LINES, _COUNTED_IN_ALL = 20_000, 200_000
# What a shape is: the number of a text that is wanted, or one of these.
_DULL, _STEP = -1, -2
_START: Phase = "start"
_OF_PHASE: dict[Phase, int] = {"step": _STEP, "checkpoint": -3, "evaluation": -4}
_BEGUN: dict[int, Phase] = {state: phase for phase, state in _OF_PHASE.items()}
_PHASES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    (
        "checkpoint",
        re.compile(r"(?i)\b(?:sav(?:e|ing)|writ(?:e|ing))\b.{0,80}\b(?:checkpoint|ckpt|model|state)"),
    ),
    ("evaluation", re.compile(r"(?i)\b(?:evaluat\w*|validat\w*|eval|valid|test)\b(?! ?loss\b)")),
)


def _phase_of(text: str) -> Phase | None:
    """The phase that a line tells to begin; None for most lines."""
    return next((phase for phase, form in _PHASES if form.search(text)), None)


def who_of(speaker: Speaker) -> str:
    """A writer's name: its rank, or what else tells writers of one log apart; empty where nothing does."""
    return f"rank {speaker.rank}" if speaker.rank is not None else speaker.label


class Sightings:
    """Takes the bytes of logs, one after the other; `seen` says who said the texts that were asked for."""

    def __init__(self, wanted: Iterable[str]) -> None:
        """``wanted``: texts as `like` gives them."""
        self._wanted = {text: at for at, text in enumerate(dict.fromkeys(wanted))}
        self._by = [Counter[str]() for _ in self._wanted]
        self._first: dict[int, tuple[Phase, int]] = {}
        self._begins: dict[int, Phase] = {
            at: phase for text, at in self._wanted.items() if (phase := _phase_of(text))
        }
        self._speakers: Counter[str] = Counter()
        self._lines = 0
        self._counted = 0
        self._phase: Phase = _START
        self.begin("")

    def begin(self, source: str, rank: int | None = None) -> None:
        """Begin a log; ``rank``: who wrote it, where all of it is of one rank."""
        self._source = source
        self._label = f"rank {rank}" if rank is not None else ""
        self._rest = b""
        self._shapes: dict[bytes, int] = {}
        self._line = 0
        self._phase = _START
        self._entered = Counter[Phase]()

    def take(self, data: bytes) -> None:
        """Take some bytes; a line may go on in the next ones."""
        data = self._rest + data
        *lines, rest = split_lines(data)
        self._rest = rest[: 4 * _LOOKED_AT_BYTES]
        for line, shape in zip(lines, split_lines(data.translate(FOLD)), strict=False):
            self._line += 1
            state = self._shapes.get(shape)
            if state == _DULL and not self._counts():
                continue
            if state is None:
                state = self._kind(line)
                if len(self._shapes) < _MOST_SHAPES:
                    self._shapes[shape] = state
            self._count(line, state)
        self._lines += len(lines)

    def end(self) -> None:
        """End a log: take its last line, though it has no end."""
        if self._rest:
            self.take(b"\n")

    def seen(self) -> Seen:
        """What was seen so far."""
        return Seen(
            self._lines,
            dict(self._speakers),
            {text: dict(self._by[at]) for text, at in self._wanted.items()},
            {text: self._first[at] for text, at in self._wanted.items() if at in self._first},
        )

    def _kind(self, line: bytes) -> int:
        """What lines of a shape are: a text that is wanted, a step of progress, a phase, or nothing of interest."""
        text = spoken(line[:_LOOKED_AT_BYTES].decode(errors="replace")).text
        at = self._wanted.get(like(text))
        if at is not None:
            return at
        phase = _phase_of(text)
        if phase is not None:
            return _OF_PHASE[phase]
        return _STEP if STEPS.search(text) else _DULL

    def _count(self, line: bytes, state: int) -> None:
        phase = _BEGUN.get(state) or self._begins.get(state)
        if phase and phase != self._phase:
            self._phase = phase
            self._entered[phase] += 1
        counts = self._counts()
        if state < 0 and not counts:
            return
        who = self._label or self._who(line)
        if counts and (who in self._speakers or len(self._speakers) < _MOST_SPEAKERS):
            self._counted += 1
            self._speakers[who] += 1
        if state >= 0:
            self._first.setdefault(state, (self._phase, max(0, self._entered[self._phase] - 1)))
            if who in self._by[state] or len(self._by[state]) < _MOST_SPEAKERS:
                self._by[state][who] += 1

    def _counts(self) -> bool:
        return self._line <= _COUNTED_LINES and self._counted < _COUNTED_IN_ALL

    def _who(self, line: bytes) -> str:
        speaker = spoken(line[:_LOOKED_AT_BYTES].decode(errors="replace")).speaker
        return who_of(speaker) or self._source
