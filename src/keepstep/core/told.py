"""What passes between the rooms that explain a failure from words: rows of tables, what a line told, the verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

CauseClass = Literal["storage", "network", "node", "user", "other"]
"""The classes of TRANSOM's table I."""

Role = Literal["cause", "suspect", "exception", "outcome", "echo", "timeout", "note", "harmless"]
"""What a line does in a failure, by falling weight.

``cause`` starts one; ``suspect`` starts one unless somebody had a cause of its own; ``exception`` is an error of the
program that no row knows better; ``outcome`` tells how a process ended, not why; ``echo`` only tells of another rank;
``timeout`` is an echo of somebody who lost patience; ``note`` confirms a cause and is none; ``harmless`` never counts.
"""

Phase = Literal["start", "step", "evaluation", "checkpoint"]
"""What a job was at when a line was written: before its first step, and from then on."""

CLASSES: tuple[CauseClass, ...] = ("storage", "network", "node", "user", "other")
ROLES: tuple[Role, ...] = ("cause", "suspect", "exception", "outcome", "echo", "timeout", "note", "harmless")
KERNEL_SOURCES = ("kernel", "NVML", "control group")
"""Names of the logs in which a node's kernel and its drivers speak."""
BLAMES = ("speaker", "alone", "link", "gpu", "rank", "node", "path", "store", "device", "process", "nobody")
"""Whom a row blames: who said it (``alone``: beside others), or what stands at that place of its text."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table of messages.

    Attributes:
        patterns: regular expressions, tried in their order; their groups are the places of the text (``rank``, ``pci``,
            ``peer``, ``path``, …).
        lookups: numbers of patterns, each with words in lower case that all stand in a text that matches; a pattern may
            have several lookups, of which one is enough.
        kind: the finer kind within the class.
        blames: one of `BLAMES`.
        example: a line that matches; ``near``: one that looks like it and must not.
        origin: the file of the table.
        general: a row with a higher number counts only where none with a lower one matches: 1 for words that anybody
            uses, 2 for the mere type of an error.
    """

    name: str
    patterns: tuple[str, ...]
    lookups: tuple[tuple[int, frozenset[str]], ...]
    role: Role
    cause_class: CauseClass
    kind: str
    title: str
    blames: str = "nobody"
    advice: str = ""
    example: str = ""
    near: str = ""
    source: str = ""
    licence: str = ""
    origin: str = ""
    general: int = 0


@dataclass(frozen=True, slots=True)
class Speaker:
    """Who wrote a line, as far as its prefixes tell.

    Attributes:
        rank: in the job; ``local_rank``: within a node.
        node: the host's name.
        label: what tells writers of one log apart; empty where nothing does.
        pid: of the process, and ``gpu`` the number of its GPU, as NCCL writes them.
    """

    rank: int | None = None
    local_rank: int | None = None
    node: str = ""
    label: str = ""
    pid: int | None = None
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """What a line told: the row that it matches, where it stands, and who said it when.

    Attributes:
        line: as it was written; ``text``: without prefixes.
        number: of the line in its source, from 1.
        time_s: since the epoch, where the line has a date; ``boot_s``: seconds of a kernel's own clock.
        block: lines of one error of one speaker have the same number.
        begins: number of the line at which the traceback of the error begins; 0 without one.
        places: what stands at the named places of the row's text.
        warned: it was written as a warning, not as an error.
        went_on: how many lines of progress (iterations, bars) came later.
        count: how many lines told the same, by this speaker.
        survived: how many times the job went on after such lines before it came to this one.
        recent: how many of the lines came since, with this one.
        beside: lines of the same speaker right before and after an error of a file system or store, as far as they
            may tell what it was about.
    """

    row: Row
    line: str
    text: str
    number: int
    source: str = ""
    time_s: float | None = None
    boot_s: float | None = None
    speaker: Speaker = Speaker()
    block: int = 0
    begins: int = 0
    places: Mapping[str, str] = field(default_factory=dict[str, str])
    warned: bool = False
    went_on: int = 0
    count: int = 1
    survived: int = 0
    recent: int = 1
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NewLine:
    """A line that no row of the tables knows, of a shape that its log did not have before.

    Attributes:
        line: as it was written; ``text``: without prefixes; ``number``: of the line in its source, from 1.
        level: ``info``, ``warning``, ``error`` or empty.
        progress: how many lines of progress came before it.
        settled_lines: lines since the first of progress; ``settled_new``: how many of these were new, with this one.
    """

    line: str
    text: str
    number: int
    source: str = ""
    time_s: float | None = None
    speaker: Speaker = Speaker()
    level: str = ""
    progress: int = 0
    settled_lines: int = 0
    settled_new: int = 0


FEW_STEPS = 5
"""An error after which each rank has made more lines of progress than this did not end the job."""

_NUMBERS = re.compile(r"(?:0x[0-9a-fA-F]+|\d[\d.,:e+-]*|\s)+")


def like(text: str) -> str:
    """What texts have in common that differ in numbers only."""
    return _NUMBERS.sub(" ", text).strip()


@dataclass(frozen=True, slots=True)
class Seen:
    """What logs had of some texts, by `like`.

    Attributes:
        lines: how many were looked through.
        speakers: lines by who wrote them (a rank, a node, or a log), of those at the beginning of each log.
        by: who said a text, and how often.
        phase: in what phase of the job a text was said first, and how often the job had been in that phase before.
    """

    lines: int
    speakers: Mapping[str, int]
    by: Mapping[str, Mapping[str, int]]
    phase: Mapping[str, tuple[Phase, int]]


@dataclass(frozen=True, slots=True)
class Words:
    """All that was told in one or more logs.

    Attributes:
        told: in the order of the lines.
        lines: number of lines read.
        heard: ranks that wrote anything at all, as far as lines are labelled.
        progress: number of lines of progress (iterations, bars).
        new: the last lines that were new before anything was told, or since progress was made after it.
    """

    told: tuple[Told, ...]
    lines: int = 0
    heard: frozenset[int] = frozenset()
    progress: int = 0
    new: tuple[NewLine, ...] = ()


@dataclass(frozen=True, slots=True)
class Named:
    """Who or what words name as the culprit. One is given of all but ``node``: where that is.

    Attributes:
        thing: a GPU ("GPU 0000:9b:00") or another device ("device nvme0n1").
        peer: the other end of a link from ``node``, as an address or a host's name.
        path: of a file system, or the address of an object in a store.
    """

    rank: int | None = None
    local_rank: int | None = None
    process: int | None = None
    thing: str = ""
    peer: str = ""
    node: str = ""
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"path {self.path}"
        if self.peer:
            return f"link {self.node} - {self.peer}" if self.node else f"peer {self.peer}"
        at = f" on {self.node}" if self.node else ""
        if self.rank is not None:
            return f"rank {self.rank}{at}"
        if self.process is not None:
            return f"process {self.process}{at}"
        if self.local_rank is not None:
            return f"local rank {self.local_rank}{at}"
        return f"{self.thing}{at}" if self.thing else f"node {self.node}"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a job failed, as its words tell.

    Attributes:
        cause_class: empty where nothing failed.
        root: the line that tells the cause; None where only consequences were told.
        culprits: never who only follows.
        then: what was told of the same cause later; ``followers``: what only tells of it.
        missing: what would tell more.
    """

    cause_class: CauseClass | Literal[""]
    kind: str
    title: str
    root: Told | None = None
    culprits: tuple[Named, ...] = ()
    confidence: Literal["high", "medium", "low"] = "low"
    advice: str = ""
    then: tuple[Told, ...] = ()
    followers: tuple[Told, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stretch:
    """Lines of one log that stand together.

    Attributes:
        log: its path below the run or the folder.
        first: the number of the first line in its log, from 1; 0: not known, as the log is long.
        marked: places among ``lines`` of those that tell something; none: it is the log's end.
    """

    log: str
    rank: int | None
    first: int
    lines: tuple[str, ...]
    marked: frozenset[int] = frozenset()
