"""What launchers, loggers and kernels put before a message: taken off, and read for who spoke, when and how loudly."""

from __future__ import annotations

import re
from calendar import timegm
from dataclasses import dataclass, replace

from keepstep.core.told import Speaker

_MOST_PREFIXES = 8
_WITHIN = 400  # Prefixes end within so many characters.
_CONTROL = re.compile(r"\x1b(?:\[[0-9;?]{0,32}[ -/]?[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|[@-_])")
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")

_DATE = r"(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)"
_CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)(?:[.,](?P<part>\d{1,9}))?"
_NAMED_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?P<named>[A-Z][a-z]{2}) {1,2}(?P<day>\d{1,2})"
_DIGIT, _UPPER, _LOWER, _SPACE = "0", "A", "a", " "
# Words with a number that stand where a host may: libraries, steps, formats, source files.
_NO_HOST = (
    r"(?!(?i:c10d|h5py|s3fs?|utf-?8|sha\d+|md5|py\d|[bt]?fp?\d+|u?int\d+|mlx5_\d+|gpu\d|v\d+|"
    r"(?:rank|cuda|npu|step|iter|iteration|epoch|batch|stage|zero|layer|expert|[tpdec]p|phase|fold|trial|seed|shard)"
    r"[_-]?\d+|[\w.-]{1,60}\.(?:py|cc|cpp|cu|go|rs|h))[\]:])"
)
_PREFIXES: tuple[tuple[str, str], ...] = (
    # What a prefix begins with, and its form. Dates: ISO, CloudWatch, kubectl, Python's logging; within the brackets a
    # word may stand after the time.
    ("[0", rf"\[?{_DATE}[T ]{{1,2}}{_CLOCK}(?:Z| ?[+-]\d\d:?\d\d)?(?:[ ,]\w{{1,12}}\]|\])?[\s|,:-]*"),
    ("[0", rf"\[?(?:\d\d-\d\d )?{_CLOCK}\]?[\s|,-]+"),
    ("[", rf"\[{_NAMED_DAY} {_CLOCK} (?P<year>\d{{4}})\] ?"),  # dmesg -T
    (
        _UPPER,  # syslog
        rf"(?P<named>[A-Z][a-z]{{2}}) {{1,2}}(?P<day>\d{{1,2}}) {_CLOCK} (?P<node>[\w.-]{{1,64}}) "
        r"[\w./-]{1,40}(?:\[\d+\])?: ?",
    ),
    (_DIGIT, rf"{_DATE}T{_CLOCK}\S* (?P<node>[\w.-]{{1,64}}) [\w./-]{{1,40}}(?:\[\d+\])?: ?"),  # journalctl
    ("[<", r"(?:<\d{1,3}>)?\[ *(?P<boot>\d{1,9}\.\d{3,9})\](?:\[ *[TC]\d+\])? ?"),  # kernel
    ("[", r"\[ *\+\d{1,9}\.\d{3,9}\] ?"),  # dmesg -d
    (_LOWER, r"(?:stdout|stderr) [FP] "),
    # launchers
    ("[", r"\[(?:rank|RANK):? ?(?P<rank>\d{1,7})\]:? ?"),
    ("[", r"\[(?:default|trainer|worker)_?(?P<local>\d{1,7})\]: ?"),
    ("[", r"\[(?:1,)?(?P<rank>\d{1,7})\]<std(?:out|err)>:? ?"),  # MPI, Horovod
    ("[", r"\[(?P<rank>\d{1,7})\](?=[\w.-]{1,64}:\d+:\d+ \[\d+\] )"),
    (_LOWER, r"rank(?P<rank>\d{1,7})\[\d+\](?:\[[\w -]{1,40}\])?: ?"),  # Composer
    ("aA", r"(?P<writer>[A-Za-z][\w.-]{0,120}) \[(?:stderr|stdout)\](?: |$)"),  # milabench
    ("[", r"\[pod/(?P<node>[\w.-]{1,253})/[\w.-]{1,63}\] ?"),  # kubectl logs --prefix
    ("[", r"\[(?:[^\[\]]{0,80}[\s,])?rank=(?P<rank>\d{1,7})\] ?"),  # OLMo: [olmo.util:158, rank=6]
    ("(", r"\((?:[^()]{0,80}\W)?rank=(?P<rank>\d{1,7})\b[^()]{0,80}\) ?"),
    ("(", r"\((?P<writer>[\w.:<>-]{1,80} pid=\d+)(?:, ip=(?P<node>[\w.:-]+))?\) ?"),
    ("0 ", r" {0,4}(?P<rank>\d{1,7}): (?=\S)"),  # srun -l
    ("[", rf"\[{_NO_HOST}(?P<node>(?=[\w.-]{{0,63}}\d)[A-Za-z][\w.-]{{1,63}})\]:? (?=\S)"),
    # A local rank, or Open MPI's number of a process, which is longer.
    (
        "[",
        rf"\[{_NO_HOST}(?P<node>(?=[\w.-]{{0,63}}\d)[A-Za-z][\w.-]{{1,63}}):"
        r"(?:(?P<local>\d{1,2})|\d{3,10}(?::\d+)?)\]:? ?",
    ),
    ("[", r"\[(?P<node>[A-Za-z][\w.-]{0,63})\]\[\[\d+,\d+\],(?P<rank>\d{1,7})\](?:\[[^\]]{1,120}\])? ?"),
    # pdsh, DeepSpeed; not the devices of which a kernel tells
    (
        _LOWER,
        rf"(?!(?:nvidia-nvswitch|eth|en[ops]|ib[sp]?|bond|nvme|md|mlx|efa)\d){_NO_HOST}"
        r"(?P<node>(?=[a-z0-9.-]{0,63}[0-9])[a-z][a-z0-9.-]{1,63}): (?=\S)",
    ),
    (_DIGIT, r"(?P<node>(?:\d{1,3}\.){3}\d{1,3}): (?=\S)"),  # pdsh where nodes are known by addresses
    # loggers
    (_UPPER, r"(?P<level>[EWIFC])\d{4} \d\d:\d\d:\d\d(?:\.\d+)? +(?:\d+ +)?[^\]\s]{1,200}:\d+\] ?"),
    (_UPPER, r"(?P<level>[EWIF]) [\w/.-]{1,120}:\d+\] ?"),  # TensorFlow
    (
        "[",
        r"\[(?P<level>[EWIFC])(?:\d{3,4})? ?(?:\d\d:\d\d:\d\d(?:\.\d+)? +)?(?:\d+ +)?[^\]\s]{1,120}:\d+\] ?",
    ),
    (
        "[",
        r"\[(?:PG (?:ID )?\d+ ?(?:PG GUID \S{1,80} ?)?(?:\([^)]{0,80}\) ?)?)?Rank (?P<rank>\d{1,7})\] ?",
    ),
    ("[", r"\[(?P<level>DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\] ?"),
    ("[", r"\[(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\|[\w.]{1,80}:\d+\] "),  # Transformers
    (">", r">> "),
    (
        "[",
        rf"\[NeMo (?P<level>[IWEC]) {_DATE} {_CLOCK} [\w.]{{1,80}}:\d+\] ?(?:rank[ :]?(?P<rank>\d{{1,7}}):? )?",
    ),
    (
        _UPPER,
        r"(?P<level>DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL)(?::[\w.]{1,80}:|:| +[-|]? ?(?=[\[\w])) ?",
    ),
    (
        "-aA",
        r"(?:[\w.]{1,60} )?- (?:[\w.]{1,60} - )?(?P<level>DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL) - ",
    ),
    ("[", r"\[[\w./-]{1,80}\.(?:py|cc|cpp|cu|go|rs|h):\d+\] ?"),
    ("[", r"\[[\w./-]{1,80}\.py:\d+:\w{1,80}\] ?(?:\[Rank -?\d+\] ?)?"),
    ("[", r"\[(?P<writer>[a-z]\w{0,40}\.[\w.]{1,40})\] (?=\S)"),  # Lightning: [root.work]
    ("aA", r"(?P<writer>[\w.-]{1,80}[-_]\d{1,3}) {1,8}\| "),  # docker compose
    ("aA", r"(?P<writer>[A-Za-z][\w.-]{0,60}/\d{1,4}) (?=\S)"),  # torchx: role/replica
    # NCCL: host:pid:tid [device]
    ("aA0", r"(?P<node>[A-Za-z0-9][\w.-]{0,63}):(?P<pid>\d{1,10}):\d+ \[(?P<gpu>\d{1,3})\] "),
    (
        "[",
        rf"\[{_DATE} {_CLOCK} (?P<level>[EWIFC]) \d+ \d+\](?: \([\w-]{{1,40}}\))? [\w.]{{1,80}}:\d+: ?",
    ),  # Ray
    # one of several errors that a group shows
    (" |+", r"\s{0,40}(?:\| ?|\+[-+]{2,80} ?){1,9}(?=\S)"),
    (" *", r"\s{0,40}\* \d+ x (?=\S)"),
)
_BAR = re.compile(r"[^|]{0,120}\d{1,3}%\|[^|]{0,300}\| *\d[^\[]{0,40}\[[^\]]{0,80}\] *(?=\S)")


def _by_first() -> dict[str, tuple[re.Pattern[str], ...]]:
    """The prefixes that a text may begin with, by the kind of its first character."""
    kinds = sorted({kind for kinds, _ in _PREFIXES for kind in kinds})
    compiled = [(kinds, re.compile(form)) for kinds, form in _PREFIXES]
    return {kind: tuple(form for kinds, form in compiled if kind in kinds) for kind in kinds}


_FORMS = _by_first()
_NCCL_LEVEL = re.compile(r"NCCL (?P<level>INFO|TRACE|WARN)")
_INNER_LEVEL = re.compile(
    r"(?:^|[\s\[|-])(?P<level>DEBUG|INFO|NOTICE|WARNING|ERROR|CRITICAL|FATAL)(?=[\s\]|:-])"
)
_WARNED = re.compile(r"\b[A-Z]\w{2,40}Warning: ")
_LEVELS = {
    "d": "info", "debug": "info", "i": "info", "info": "info", "notice": "info", "trace": "info",
    "w": "warning", "warn": "warning", "warning": "warning",
    "e": "error", "error": "error", "f": "error", "fatal": "error", "c": "error", "critical": "error",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spoken:
    """A line with its prefixes off.

    Attributes:
        level: ``info``, ``warning``, ``error``, or empty where the line does not say.
        indent: characters of white space before the text.
    """

    text: str
    speaker: Speaker
    level: str = ""
    time_s: float | None = None
    boot_s: float | None = None
    indent: int = 0


def spoken(line: str) -> Spoken:
    """The line without colours and prefixes, and what these tell."""
    text = _CONTROL.sub("", line) if "\x1b" in line else line
    at, level, speaker = 0, "", Speaker()
    time_s: float | None = None
    boot_s: float | None = None
    labels: list[str] = []
    for _ in range(_MOST_PREFIXES):
        found = _prefix(text, at)
        if found is None:
            break
        at = found.end()
        groups = found.groupdict()
        level = level or _LEVELS.get((groups.get("level") or "").lower(), "")
        if time_s is None and groups.get("hour"):
            time_s = _time(groups)
        if boot_s is None and groups.get("boot"):
            boot_s = float(groups["boot"])
        speaker, label = _heard(speaker, groups)
        if label:
            labels.append(label)
    rest = text[at:]
    if not level and (found := _NCCL_LEVEL.search(rest, 0, _WITHIN)):
        level = _LEVELS[found["level"].lower()]
    if not level and _WARNED.search(rest, 0, _WITHIN):
        level = "warning"
    if not level and at and (found := _INNER_LEVEL.search(rest, 0, 80)):
        level = _LEVELS[found["level"].lower()]
    bare = rest.lstrip()
    if labels:
        speaker = replace(speaker, label=" ".join(dict.fromkeys(labels)))
    return Spoken(bare.rstrip(), speaker, level, time_s, boot_s, len(rest) - len(bare))


def _prefix(text: str, at: int) -> re.Match[str] | None:
    """The prefix that begins at a place; a progress bar before a message is one."""
    first = text[at : at + 1]
    if first.isascii() and first.isalpha():
        first = _UPPER if first.isupper() else _LOWER
    elif first.isdecimal():
        first = _DIGIT
    elif first.isspace():
        first = _SPACE
    for form in _FORMS.get(first, ()):
        if found := form.match(text, at, at + _WITHIN):
            return found
    return _BAR.match(text, at, at + _WITHIN) if "%|" in text else None


def _heard(speaker: Speaker, groups: dict[str, str | None]) -> tuple[Speaker, str]:
    rank, local, node = groups.get("rank"), groups.get("local"), groups.get("node")
    label = ""
    if rank is not None:
        label = f"rank {int(rank)}"
        if speaker.rank is None:
            speaker = replace(speaker, rank=int(rank))
    if local is not None:
        label = f"local rank {int(local)}"
        if speaker.local_rank is None:
            speaker = replace(speaker, local_rank=int(local))
    if groups.get("gpu"):
        speaker = replace(speaker, pid=int(groups["pid"] or 0), gpu=int(groups["gpu"] or 0))
        label = label or f"{node}:{groups['pid']}"
    if node and not speaker.node:
        speaker, label = replace(speaker, node=node), label or groups.get("writer") or node
    label = label or groups.get("writer") or ""
    return speaker, label


def _time(groups: dict[str, str | None]) -> float | None:
    """Seconds since the epoch; None where the date is missing or none."""
    named, year = (groups.get("named") or "").lower(), groups.get("year")
    month = _MONTHS.index(named) + 1 if named in _MONTHS else int(groups.get("month") or 0)
    if not year or not 1 <= month <= 12:
        return None
    numbers = [int(groups[name] or 0) for name in ("day", "hour", "minute", "second")]
    part = groups.get("part")
    return timegm((int(year), month, *numbers)) + (float(f"0.{part}") if part else 0.0)
