"""Fault sentences: what to break, where, when and for how long, in words.

``str(fault)`` is the sentence that :func:`parse` reads back as the same fault. Steps count from 0 as the script counts
them, times are seconds, factors are of the healthy compute time (2x: takes twice as long).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from keepstep.core.errors import FaultError

Place = Literal["forward", "backward", "optimizer", "data"]
PLACES: tuple[Place, ...] = ("forward", "backward", "optimizer", "data")


class _Sentence:
    """A fault as a sentence: the words of ``pattern``, in which ``{name}`` stands for a part that varies (`_PARTS`)."""

    __slots__ = ()
    pattern: ClassVar[str]  # its parts follow the order of the fields

    def __str__(self) -> str:
        said = (_PARTS[word][1](self) if word in _PARTS else word for word in self.pattern.split())
        return " ".join(filter(None, said))


@dataclass(frozen=True, slots=True)
class Slow(_Sentence):
    """``slow rank 2 by 2x at step 30 for 15 steps``: the rank's compute takes ``factor`` times as long."""

    pattern = "slow rank {rank} by {factor} {at_step} {for_steps}"
    rank: int
    factor: float
    step: int
    steps: int | None = None  # None: to the end of the job


@dataclass(frozen=True, slots=True)
class Delay(_Sentence):
    """``delay rank 2 by 0.06 s in forward 3 at step 20 for 12 steps``: one pass of each step comes that much later.

    ``entry`` counts, from 0, how often the rank has entered the phase in the step: the micro-batch, where a stage has
    one layer.
    """

    pattern = "delay rank {rank} by {seconds} {place} {entry} {at_step} {for_steps}"
    rank: int
    seconds: float
    place: Place
    entry: int
    step: int
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class SlowData(_Sentence):
    """``slow data loader of rank 2 by 0.5 s at step 10 for 5 steps``: every batch comes that much later."""

    pattern = "slow data loader of rank {rank} by {seconds} {at_step} {for_steps}"
    rank: int
    seconds: float
    step: int
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class Hang(_Sentence):
    """``hang rank 1 at step 40 in backward``: the rank sleeps there, for ever or for ``seconds``."""

    pattern = "hang rank {rank} {at_step} {place} {for_seconds}"
    rank: int
    step: int
    place: Place
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Stop(_Sentence):
    """``stop rank 1 at step 5 for 10 s``: SIGSTOP; SIGCONT after ``seconds``, or never."""

    pattern = "stop rank {rank} {at_step} {for_seconds}"
    rank: int
    step: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Kill(_Sentence):
    """``kill rank 3 at step 9``: SIGKILL."""

    pattern = "kill rank {rank} {at_step}"
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Raise(_Sentence):
    """``raise in rank 0 at step 7``: the script raises :class:`keepstep.faults.InjectedError`."""

    pattern = "raise in rank {rank} {at_step}"
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class Skip(_Sentence):
    """``skip in rank 2 at step 20``: leaves out the next collective that the script itself calls, from that step on."""

    pattern = "skip in rank {rank} {at_step}"
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class SlowLink(_Sentence):
    """``slow link from hostA to hostB to 20mbit at 5 s for 10 s``: both ways between the two hosts, nothing else.

    ``slow link of hostA to 20mbit …`` slows all of the host's traffic. Seconds count from the injection's start.
    """

    pattern = "slow link {ends} to {rate} {at_seconds} {for_seconds}"
    host: str
    peer: str | None  # None: all other hosts
    rate: str  # as tc writes it: 20mbit, 500kbit, 1gbit
    at_s: float = 0.0
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class LinkDown(_Sentence):
    """``link down of hostA at 5 s for 3 s``: the host's interface is taken down."""

    pattern = "link down of {host} {at_seconds} {for_seconds}"
    host: str
    at_s: float = 0.0
    seconds: float | None = None


RankFault = Slow | Delay | SlowData | Hang | Stop | Kill | Raise | Skip
LinkFault = SlowLink | LinkDown
Fault = RankFault | LinkFault

# A sentence of each kind; the first word, of slow ones the first two, tells the kind.
EXAMPLES: dict[str, type[Fault]] = {
    "slow rank 2 by 2x at step 30 for 15 steps": Slow,
    "slow data loader of rank 2 by 0.5 s at step 10 for 5 steps": SlowData,
    "hang rank 1 at step 40 in backward": Hang,
    "stop rank 1 at step 5 for 10 s": Stop,
    "kill rank 3 at step 9": Kill,
    "raise in rank 0 at step 7": Raise,
    "slow link from hostA to hostB to 20mbit at 5 s for 10 s": SlowLink,
    "slow link of hostA to 20mbit at 5 s": SlowLink,
    "link down of hostA at 5 s for 3 s": LinkDown,
    "skip in rank 2 at step 20": Skip,
    "delay rank 2 by 0.06 s in forward 3 at step 20 for 12 steps": Delay,
}


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

    def for_steps(self) -> int | None:
        if not self.has("for"):
            return None
        steps = self.count("a number of steps")
        if not self.has("step"):
            self.words("steps")
        return steps

    def at_step(self) -> int:
        self.words("at step")
        return self.count("a step")

    def place(self) -> Place:
        self.words("in")
        place: Place | None = next((place for place in PLACES if self.has(place)), None)
        if place is None:
            raise self.refuse("one of " + ", ".join(PLACES))
        return place

    def at_seconds(self) -> float:
        return self.seconds() if self.has("at") else 0.0

    def for_seconds(self) -> float | None:
        return self.seconds() if self.has("for") else None

    def host(self) -> str:
        return self.take(r"[A-Za-z0-9][A-Za-z0-9._-]*", "a host name")

    def ends(self) -> tuple[str, str | None]:
        if self.has("of"):
            return self.host(), None
        self.words("from")
        host = self.host()
        self.words("to")
        return host, self.host()

    def end(self) -> None:
        if self._next < len(self._words):
            raise self.refuse("the end")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def _for_steps(fault: Any) -> str:
    return "" if fault.steps is None else f"for {fault.steps} step{'' if fault.steps == 1 else 's'}"


def _for_seconds(fault: Any) -> str:
    return "" if fault.seconds is None else f"for {_number(fault.seconds)} s"


_RATE = r"\d{1,6}(\.\d+)?[kmg]?bit"
_ENTRY = "the how-manyth time in a step, from 0"
# The varying parts of sentences: how the fields of a fault are read (several: a tuple), and how they are written.
_PARTS: dict[str, tuple[Callable[[_Words], Any], Callable[[Any], str]]] = {
    "{rank}": (lambda words: words.count("a rank"), lambda fault: str(fault.rank)),
    "{factor}": (_Words.factor, lambda fault: f"{_number(fault.factor)}x"),
    "{seconds}": (_Words.seconds, lambda fault: f"{_number(fault.seconds)} s"),
    "{place}": (_Words.place, lambda fault: f"in {fault.place}"),
    "{entry}": (lambda words: words.count(_ENTRY), lambda fault: str(fault.entry)),
    "{at_step}": (_Words.at_step, lambda fault: f"at step {fault.step}"),
    "{for_steps}": (_Words.for_steps, _for_steps),
    "{at_seconds}": (_Words.at_seconds, lambda fault: f"at {_number(fault.at_s)} s"),
    "{for_seconds}": (_Words.for_seconds, _for_seconds),
    "{host}": (_Words.host, lambda fault: fault.host),
    "{ends}": (
        _Words.ends,
        lambda fault: f"of {fault.host}" if fault.peer is None else f"from {fault.host} to {fault.peer}",
    ),
    "{rate}": (lambda words: words.take(_RATE, 'a rate such as "20mbit"'), lambda fault: fault.rate),
}


def parse_one(sentence: str) -> Fault:
    """The fault that one sentence describes.

    Raises:
        FaultError: names the word that does not fit, what was expected there, and an example.
    """
    said = sentence.lower().split()
    for example, kind in EXAMPLES.items():
        start = example.split()[: 2 if example.startswith("slow") else 1]
        if said[: len(start)] == start:
            words = _Words(sentence.strip(), example)
            values: list[Any] = []
            for word in kind.pattern.split():
                if word in _PARTS:
                    found = _PARTS[word][0](words)
                    values += found if isinstance(found, tuple) else (found,)
                else:
                    words.words(word)
            words.end()
            return kind(*values)
    raise FaultError(
        f'fault "{sentence.strip()}": expected a sentence such as one of\n  ' + "\n  ".join(EXAMPLES)
    )


def parse(text: str) -> tuple[Fault, ...]:
    """All faults of a text: sentences separated by ``;`` or newlines. Raises :class:`FaultError`; also when empty."""
    sentences = [sentence for sentence in re.split(r"[;\n]", text) if sentence.strip()]
    if not sentences:
        raise FaultError(f"no fault given: expected a sentence such as {next(iter(EXAMPLES))}")
    return tuple(parse_one(sentence) for sentence in sentences)


def sentences(faults: tuple[Fault, ...]) -> str:
    """The text that :func:`parse` reads back as ``faults``."""
    return "; ".join(str(fault) for fault in faults)
