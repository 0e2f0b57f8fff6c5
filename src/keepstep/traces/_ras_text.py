"""The text that NCCL's RAS answers to STATUS and VERBOSE STATUS: only what is odd is told rank by rank."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from keepstep.core.errors import TraceError
from keepstep.traces.ras_status import MOST_RANKS, RankStanding, RasAnswer, RasCommunicator, RasRank

_LONGEST_LINE = 4096
_VERSION = re.compile(r"NCCL version (\S{1,64})")
_GROUP = re.compile(
    r"\s*(\d{1,7})\s+(\d{1,7})\s+\d{1,7}\s+\S{1,20}\s+(\d{1,7})\s+\d{1,7}\s+([A-Z]+)\s+([A-Z,]+)$"
)
_GPUS = re.compile(r"(?:\s+\d{1,9}){5}$")
_NAMED = re.compile(r"#(\d{1,7})-(\d{1,7}) \(([0-9a-f]{1,16})\) (INCOMPLETE|ERROR|MISMATCH)")
_DIFFER = re.compile(r"\s+Communicator ranks have different (\w{1,32}) operation counts")
_LAUNCHED = re.compile(
    r"\s+(\d{1,7}) ranks have (?:launched up to operation (\d{1,19})|not launched any operations)"
)
_ALONE = re.compile(
    r"\s+Rank (\d{1,10}) has (?:launched up to operation (\d{1,19})|not launched any operations)"
)
_MANY = re.compile(r"\s+(\d{1,7}) ranks (have status|reported) (\w[\w ]{0,40})$")
_ONE = re.compile(r"\s+Rank (\d{1,10}) (has status|reported) (\w[\w ]{0,40}?)(?: -- |$)")
_RANK = re.compile(r"\s+Rank (\d{1,10}) -- ")
_WHO = re.compile(
    r"-- GPU (\d{1,4})(?: \(NVML (\d{1,4})\))? managed by process (\d{1,10}) on node (\S{1,256})"
)
_MISSING = re.compile(r"\s+The missing ranks?: ([\d ,-]{1,4000})$")
_DEAD = re.compile(r"\s+Process (\d{1,10}) on node (\S{1,256}) managing GPU")
_LATE = re.compile(r"\s+Encountered (\d{1,9}) communication timeouts?")
_STANDINGS: dict[str, RankStanding] = {
    "INIT": "setting up", "RUNNING": "in", "FINALIZE": "finalizing", "ABORT": "aborting", "NOCOMM": "not in",
    "UNKNOWN": "not in",
}  # fmt: skip


@dataclass(slots=True)
class _Found:
    """What the text tells of one communicator, by rank; counts by kind, then by rank."""

    name: str
    size: int
    who: dict[int, tuple[str, int, str]] = field(default_factory=dict[int, tuple[str, int, str]])
    silent: set[int] = field(default_factory=set[int])
    counts: defaultdict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    unnamed: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # by kind: counts
    standings: dict[int, RankStanding] = field(default_factory=dict[int, RankStanding])
    errors: dict[int, str] = field(default_factory=dict[int, str])


def read_text(data: bytes) -> RasAnswer | None:
    """The answer in a text; None where it holds none. Raises TraceError beyond the bounds."""
    reading = _Reading()
    for line in _lines(data):
        reading.take(line)
    return reading.answer() if reading.version else None


def _lines(data: bytes) -> Iterator[str]:
    for line in data.splitlines():
        yield line[:_LONGEST_LINE].decode("utf-8", "replace").rstrip()


class _Reading:
    """The lines that were read so far."""

    def __init__(self) -> None:
        self.version = ""
        self._sizes: list[int] = []  # sizes of communicators, by the number of the group in the table
        self._found: dict[tuple[int, int], _Found] = {}
        self._here: _Found | None = None
        self._section = ""
        self._kind = ""
        self._class: tuple[str, str, int] = "", "", 0  # what the ranks below share: sort, word or kind, count
        self._left = 0  # how many ranks of that class are yet to be named
        self._dead: set[tuple[str, int]] = set()
        self._gpus = 0
        self._late = 0

    def take(self, line: str) -> None:
        if not self.version:
            if found := _VERSION.search(line):
                self.version = found[1]
            return
        if not line:
            return
        if not line[0].isspace():
            self._head(line)
        elif found := _GROUP.match(line):
            if int(found[1]) == len(self._sizes):
                self._sizes.append(int(found[3]))
        elif not self._sizes and _GPUS.fullmatch(line):
            self._gpus = int(line.split()[-1])
        elif self._here is None:
            self._in_no_communicator(line)
        else:
            self._of(self._here, line)

    def _head(self, line: str) -> None:
        """A line at the margin begins a section or a communicator."""
        self._end_class()
        found = _NAMED.match(line)
        self._section, self._here, self._kind = found[4] if found else line[:16], None, ""
        if found:
            key = int(found[1]), int(found[2])
            size = self._sizes[key[0]] if key[0] < len(self._sizes) else 0
            self._here = self._found.setdefault(key, _Found("0x" + found[3].lstrip("0"), size))

    def _in_no_communicator(self, line: str) -> None:
        if self._section == "DEAD" and (found := _DEAD.match(line)):
            self._dead.add((found[2], int(found[1])))
        elif found := _LATE.match(line):
            self._late = int(found[1])

    def _of(self, here: _Found, line: str) -> None:
        if found := _DIFFER.match(line):
            self._end_class()
            self._kind = found[1]
        elif found := _LAUNCHED.match(line):
            self._begin_class("launched", self._kind, int(found[2] or 0), int(found[1]))
        elif found := _ALONE.match(line):
            self._end_class()
            here.counts[self._kind][int(found[1])] = int(found[2] or 0)
            self._name(here, int(found[1]), line)
        elif found := _MANY.match(line):
            self._begin_class(found[2], found[3], 0, int(found[1]))
        elif found := _ONE.match(line):
            self._end_class()
            self._tell(here, int(found[1]), found[2], found[3])
            self._name(here, int(found[1]), line)
        elif found := _RANK.match(line):
            self._in_class(here, int(found[1]))
            self._name(here, int(found[1]), line)
        elif found := _MISSING.match(line):
            here.silent.update(_ranks(found[1], here.size))

    def _begin_class(self, sort: str, word: str, count: int, many: int) -> None:
        self._end_class()
        self._class, self._left = (sort, word, count), many

    def _end_class(self) -> None:
        """A class of ranks that was told by its number only."""
        sort, kind, count = self._class
        if self._left > 0 and sort == "launched" and self._here is not None:
            self._here.unnamed[kind].append(count)
        self._class, self._left = ("", "", 0), 0

    def _in_class(self, here: _Found, rank: int) -> None:
        sort, word, count = self._class
        if not sort and self._section == "INCOMPLETE":
            here.silent.add(rank)
            return
        self._left -= 1
        if sort == "launched":
            here.counts[word][rank] = count
        elif sort:
            self._tell(here, rank, sort, word)

    def _tell(self, here: _Found, rank: int, sort: str, word: str) -> None:
        if sort == "reported":
            here.errors[rank] = word.replace("Unhandled", "unhandled") if "CUDA" in word else word.lower()
        elif word in _STANDINGS:
            here.standings[rank] = _STANDINGS[word]

    def _name(self, here: _Found, rank: int, line: str) -> None:
        if found := _WHO.search(line):
            here.who[rank] = found[4], int(found[3]), found[2] or found[1]

    def answer(self) -> RasAnswer:
        self._end_class()
        missing = [
            "ranks and communicators in which nothing is odd: text leaves them out; NCCL 2.28.7 has JSON"
        ]
        if self._late:
            missing.append(f"what came after {self._late} timeouts of RAS itself")
        if sum(one.size for one in self._found.values()) > MOST_RANKS:
            raise TraceError(f"tells of more than {MOST_RANKS:,} ranks of communicators")
        read = [_communicator(one, self._dead) for one in self._found.values()]
        return RasAnswer(self.version, tuple(filter(None, read)), False, self._gpus, tuple(missing))


def _ranks(listed: str, size: int) -> set[int]:
    """Ranks that NCCL 2.24 to 2.26 lists as ``0-3,7``, without those that the communicator does not have."""
    found: set[int] = set()
    for part in listed.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            found.update(range(int(first), min(int(last or first) + 1, size)))
    return found


def _communicator(found: _Found, dead: set[tuple[str, int]]) -> RasCommunicator | None:
    """The communicator with all its ranks, each count filled in that only one class of ranks can have.

    None for an impossible one:
    NCCL 2.27 tells of ranks beyond the size where it reads what is no communicator (NVIDIA/nccl#1762).
    """
    told = {*found.who, *found.silent, *found.standings, *found.errors}.union(*found.counts.values())
    if not found.size > 0 or max(told, default=0) >= found.size:
        return None
    counts: dict[int, dict[str, int]] = {}
    for kind in {*found.counts, *found.unnamed}:
        others = found.unnamed.get(kind, [])
        for rank in range(found.size):
            count = found.counts[kind].get(rank, others[0] if len(others) == 1 else None)
            if count is not None and rank not in found.silent and found.standings.get(rank, "in") == "in":
                counts.setdefault(rank, {})[kind] = count
    ranks: dict[int, RasRank] = {}
    unknown = sorted(found.silent - found.who.keys())
    if len(unknown) == len(dead) == 1:
        found.who[unknown[0]] = (*next(iter(dead)), "")
    for rank in range(found.size):
        host, process, gpu = found.who.get(rank, ("", 0, ""))
        standing = found.standings.get(rank, "in")
        if rank in found.silent:
            standing = "dead" if (host, process) in dead else "silent"
        ranks[rank] = RasRank(
            rank, host, process, gpu, counts.get(rank, {}), standing, found.errors.get(rank, "")
        )
    return RasCommunicator(found.name, found.size, ranks)
