"""Fault sentences: what to break, where, when and for how long, in words.

``str(fault)`` is the sentence that :func:`parse` reads back as the same fault. Steps count from 0 as the script counts
them, times are seconds, factors are of the healthy compute time (2x: takes twice as long).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from keepstep.core.errors import FaultError

Place = Literal["forward", "backward", "optimizer", "data"]
PLACES: tuple[Place, ...] = ("forward", "backward", "optimizer", "data")


@dataclass(frozen=True, slots=True)
class Slow:
    """``slow rank 2 by 2x at step 30 for 15 steps``: the rank's compute takes ``factor`` times as long."""

    rank: int
    factor: float
    step: int
    steps: int | None = None  # None: to the end

    def __str__(self) -> str:
        return f"slow rank {self.rank} by {_number(self.factor)}x at step {self.step}{_for_steps(self.steps)}"


@dataclass(frozen=True, slots=True)
class Delay:
    """``delay rank 2 by 0.06 s in forward 3 at step 20 for 12 steps``: each time, that much later.

    ``entry``: the how-manyth time in a step that it enters the phase, from 0: a micro-batch of a stage of one layer.
    """

    rank: int
    seconds: float
    place: Place
    entry: int
    step: int
    steps: int | None = None

    def __str__(self) -> str:
        where = f"in {self.place} {self.entry} at step {self.step}{_for_steps(self.steps)}"
        return f"delay rank {self.rank} by {_number(self.seconds)} s {where}"


@dataclass(frozen=True, slots=True)
class SlowData:
    """``slow data loader of rank 2 by 0.5 s at step 10 for 5 steps``: every batch comes that much later."""

    rank: int
    seconds: float
    step: int
    steps: int | None = None

    def __str__(self) -> str:
        delay = f"{_number(self.seconds)} s at step {self.step}{_for_steps(self.steps)}"
        return f"slow data loader of rank {self.rank} by {delay}"


@dataclass(frozen=True, slots=True)
class Hang:
    """``hang rank 1 at step 40 in backward``: the rank sleeps there, for ever or for ``seconds``."""

    rank: int
    step: int
    place: Place
    seconds: float | None = None

    def __str__(self) -> str:
        duration = "" if self.seconds is None else f" for {_number(self.seconds)} s"
        return f"hang rank {self.rank} at step {self.step} in {self.place}{duration}"


@dataclass(frozen=True, slots=True)
class Stop:
    """``stop rank 1 at step 5 for 10 s``: SIGSTOP; SIGCONT after ``seconds``, or never."""

    rank: int
    step: int
    seconds: float | None = None

    def __str__(self) -> str:
        duration = "" if self.seconds is None else f" for {_number(self.seconds)} s"
        return f"stop rank {self.rank} at step {self.step}{duration}"


@dataclass(frozen=True, slots=True)
class Kill:
    """``kill rank 3 at step 9``: SIGKILL."""

    rank: int
    step: int

    def __str__(self) -> str:
        return f"kill rank {self.rank} at step {self.step}"


@dataclass(frozen=True, slots=True)
class Raise:
    """``raise in rank 0 at step 7``: the script raises :class:`keepstep.faults.InjectedError`."""

    rank: int
    step: int

    def __str__(self) -> str:
        return f"raise in rank {self.rank} at step {self.step}"


@dataclass(frozen=True, slots=True)
class Skip:
    """``skip in rank 2 at step 20``: leaves out the next collective that the script itself calls, from that step on."""

    rank: int
    step: int

    def __str__(self) -> str:
        return f"skip in rank {self.rank} at step {self.step}"


@dataclass(frozen=True, slots=True)
class SlowLink:
    """``slow link from hostA to hostB to 20mbit at 5 s for 10 s``: both ways between the two hosts, nothing else.

    ``slow link of hostA to 20mbit …`` slows all of the host's traffic. Seconds count from the injection's start.
    """

    host: str
    peer: str | None  # None: everybody
    rate: str  # as tc writes it: 20mbit, 500kbit, 1gbit
    at_s: float = 0.0
    seconds: float | None = None

    def __str__(self) -> str:
        ends = f"of {self.host}" if self.peer is None else f"from {self.host} to {self.peer}"
        return f"slow link {ends} to {self.rate} at {_number(self.at_s)} s{_for_seconds(self.seconds)}"


@dataclass(frozen=True, slots=True)
class LinkDown:
    """``link down of hostA at 5 s for 3 s``: the host's interface is taken down."""

    host: str
    at_s: float = 0.0
    seconds: float | None = None

    def __str__(self) -> str:
        return f"link down of {self.host} at {_number(self.at_s)} s{_for_seconds(self.seconds)}"


RankFault = Slow | Delay | SlowData | Hang | Stop | Kill | Raise | Skip
LinkFault = SlowLink | LinkDown
Fault = RankFault | LinkFault

EXAMPLES = (
    "slow rank 2 by 2x at step 30 for 15 steps",
    "slow data loader of rank 2 by 0.5 s at step 10 for 5 steps",
    "hang rank 1 at step 40 in backward",
    "stop rank 1 at step 5 for 10 s",
    "kill rank 3 at step 9",
    "raise in rank 0 at step 7",
    "slow link from hostA to hostB to 20mbit at 5 s for 10 s",
    "slow link of hostA to 20mbit at 5 s",
    "link down of hostA at 5 s for 3 s",
    "skip in rank 2 at step 20",
    "delay rank 2 by 0.06 s in forward 3 at step 20 for 12 steps",
)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _for_steps(steps: int | None) -> str:
    return "" if steps is None else f" for {steps} step{'' if steps == 1 else 's'}"


def _for_seconds(seconds: float | None) -> str:
    return "" if seconds is None else f" for {_number(seconds)} s"


class _Words:
    """One sentence, read from left to right; every refusal says what was expected there."""

    def __init__(self, sentence: str, example: str) -> None:
        self.sentence, self.example = sentence, example
        self._words = sentence.split()
        self._next = 0

    def refuse(self, expected: str) -> FaultError:
        word = self._words[self._next] if self._next < len(self._words) else None
        found = "the sentence ends" if word is None else f'"{word}" stands'
        return FaultError(
            f'fault "{self.sentence}": expected {expected} where {found}; for example: {self.example}'
        )

    def has(self, word: str) -> bool:
        if self._next < len(self._words) and self._words[self._next].lower() == word:
            self._next += 1
            return True
        return False

    def words(self, phrase: str) -> None:
        for word in phrase.split():
            if not self.has(word):
                raise self.refuse(f'"{word}"')

    def take(self, pattern: str, expected: str) -> str:
        if self._next < len(self._words) and re.fullmatch(pattern, self._words[self._next]):
            self._next += 1
            return self._words[self._next - 1]
        raise self.refuse(expected)

    def count(self, what: str) -> int:
        return int(self.take(r"\d{1,9}", f"{what} (a whole number)"))

    def factor(self) -> float:
        factor = float(self.take(r"\d{1,6}(\.\d+)?[x×]", 'a factor such as "2x"')[:-1])
        if factor < 1:
            self._next -= 1
            raise self.refuse('a factor of at least "1x"')
        return factor

    def seconds(self) -> float:
        word = self.take(r"\d{1,9}(\.\d+)?(e-\d+)?s?", 'seconds such as "10 s"')
        if not word.endswith("s"):
            self.words("s")
        return float(word.rstrip("s"))

    def steps(self) -> int | None:
        if not self.has("for"):
            return None
        steps = self.count("a number of steps")
        if not self.has("step"):
            self.words("steps")
        return steps

    def duration(self) -> float | None:
        return self.seconds() if self.has("for") else None

    def at_step(self) -> int:
        self.words("at step")
        return self.count("a step")

    def at_seconds(self) -> float:
        return self.seconds() if self.has("at") else 0.0

    def place(self) -> Place:
        self.words("in")
        place: Place | None = next((place for place in PLACES if self.has(place)), None)
        if place is None:
            raise self.refuse("one of " + ", ".join(PLACES))
        return place

    def end(self) -> None:
        if self._next < len(self._words):
            raise self.refuse("the end")


_HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_RATE = r"\d{1,6}(\.\d+)?[kmg]?bit"


def _slow_rank(words: _Words) -> Fault:
    words.words("slow rank")
    rank = words.count("a rank")
    words.words("by")
    return Slow(rank, words.factor(), words.at_step(), words.steps())


def _slow_data(words: _Words) -> Fault:
    words.words("slow data loader of rank")
    rank = words.count("a rank")
    words.words("by")
    return SlowData(rank, words.seconds(), words.at_step(), words.steps())


def _hang(words: _Words) -> Fault:
    words.words("hang rank")
    rank, step = words.count("a rank"), words.at_step()
    return Hang(rank, step, words.place(), words.duration())


def _delay(words: _Words) -> Fault:
    words.words("delay rank")
    rank = words.count("a rank")
    words.words("by")
    seconds, place = words.seconds(), words.place()
    entry = words.count("the how-manyth time in a step, from 0")
    return Delay(rank, seconds, place, entry, words.at_step(), words.steps())


def _stop(words: _Words) -> Fault:
    words.words("stop rank")
    return Stop(words.count("a rank"), words.at_step(), words.duration())


def _kill(words: _Words) -> Fault:
    words.words("kill rank")
    return Kill(words.count("a rank"), words.at_step())


def _raise(words: _Words) -> Fault:
    words.words("raise in rank")
    return Raise(words.count("a rank"), words.at_step())


def _skip(words: _Words) -> Fault:
    words.words("skip in rank")
    return Skip(words.count("a rank"), words.at_step())


def _slow_link(words: _Words) -> Fault:
    words.words("slow link")
    peer: str | None = None
    if words.has("of"):
        host = words.take(_HOST, "a host name")
    else:
        words.words("from")
        host = words.take(_HOST, "a host name")
        words.words("to")
        peer = words.take(_HOST, "a host name")
    words.words("to")
    rate = words.take(_RATE, 'a rate such as "20mbit"')
    return SlowLink(host, peer, rate, words.at_seconds(), words.duration())


def _link_down(words: _Words) -> Fault:
    words.words("link down of")
    return LinkDown(words.take(_HOST, "a host name"), words.at_seconds(), words.duration())


_SENTENCES: dict[str, tuple[Callable[[_Words], Fault], str]] = {
    "slow rank": (_slow_rank, EXAMPLES[0]),
    "slow data": (_slow_data, EXAMPLES[1]),
    "slow link": (_slow_link, EXAMPLES[6]),
    "hang": (_hang, EXAMPLES[2]),
    "stop": (_stop, EXAMPLES[3]),
    "kill": (_kill, EXAMPLES[4]),
    "raise": (_raise, EXAMPLES[5]),
    "link": (_link_down, EXAMPLES[8]),
    "skip": (_skip, EXAMPLES[9]),
    "delay": (_delay, EXAMPLES[10]),
}


def parse_one(sentence: str) -> Fault:
    """The fault that one sentence describes.

    Raises:
        FaultError: names the word that does not fit, what was expected there, and an example.
    """
    beginning = " ".join(sentence.lower().split())
    for start, (read, example) in _SENTENCES.items():
        if beginning == start or beginning.startswith(start + " "):
            words = _Words(sentence.strip(), example)
            fault = read(words)
            words.end()
            return fault
    raise FaultError(
        f'fault "{sentence.strip()}": expected a sentence such as one of\n  ' + "\n  ".join(EXAMPLES)
    )


def parse(text: str) -> tuple[Fault, ...]:
    """All faults of a text: sentences separated by ``;`` or newlines. Raises :class:`FaultError`; also when empty."""
    sentences = [sentence for sentence in re.split(r"[;\n]", text) if sentence.strip()]
    if not sentences:
        raise FaultError(f"no fault given: expected a sentence such as {EXAMPLES[0]}")
    return tuple(parse_one(sentence) for sentence in sentences)


def sentences(faults: tuple[Fault, ...]) -> str:
    """The text that :func:`parse` reads back as ``faults``."""
    return "; ".join(str(fault) for fault in faults)
