"""Which sentence of what a dead worker left tells why it died: of a traceback, of its stderr, of its last words.

The last line is often only a consequence: an error while the first one was handled, or the words of a lost connection.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from keepstep.core.lost_connection import tells_of_another

_MOST_CHARACTERS = 500
_MOST_LINES = 20  # Longest text of an error with what follows it, in lines.
_CHAINED = re.compile(
    r"^(?:The above exception was the direct cause of the following exception|"
    r"During handling of the above exception, another exception occurred):$",
    re.MULTILINE,
)
_HEADER = re.compile(r"^Traceback \(most recent call last\):$", re.MULTILINE)
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(: .*)?$")
_UNREAD = re.compile(
    r'^ +File ".+", line \d+\n(?:.*\n){0,4}?(?:Syntax|Indentation|Tab)Error: .*$', re.MULTILINE
)
_RANK = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch puts it before each line of a traceback
_BEHIND = re.compile(
    r"(?<=\S)(?=(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):$)", re.MULTILINE
)  # a progress bar
_PASSED_ON = re.compile(r"Caught \w+ in ")  # from a data loader's process, a thread, a replica
_LAST_ERROR = "Last error:"  # NCCL says its cause in the line that follows
# Errors that programs handle as a matter of course: an echo that follows while one is handled has another cause.
_HANDLED = re.compile(
    r"([\w.]+\.)?(Stop(Async)?Iteration|ImportError|ModuleNotFoundError|AttributeError|KeyError|IndexError|"
    r"FileNotFoundError|FileExistsError|NotImplementedError|Empty|Full|GeneratorExit)\b"
)
_TERMINATED = re.compile(
    r"^terminate called after throwing an instance of '([^'\n]+)'\n\s*what\(\): +(.*(?:\n.*)*)", re.MULTILINE
)
_FATAL = re.compile(r"^Fatal Python error: (.+)$", re.MULTILINE)
_FATAL_PLACE = re.compile(
    r"^Current thread [^\n]*\(most recent call first\):\n  File \"([^\"\n]+)\", line (\d+) in (.+)$",
    re.MULTILINE,
)


def of_traceback(trace: str) -> str:
    """The error of a traceback that tells why: of several that are chained the first of the process's own.

    The last one is told, too, where it is no echo. Empty where nothing is chained or told of another process.
    """
    errors = [error for block in _CHAINED.split(trace) if (error := _error(block))]
    return _telling(errors) if len(errors) > 1 else ""


def of_message(message: str) -> str:
    """The line of an error's text that tells why."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return _whole(lines) if lines else ""


def of_stderr(tail: str, status: int) -> str:
    """The error in the last lines of a stderr; ``status`` as in `Failure.status`. Empty where there is none.

    What somebody else's signal ended has said nothing about it.
    """
    text = _RANK.sub("", tail)
    if status < 0 and (said := of_last_words(text)):
        return said
    if status < 0 and status != -signal.SIGABRT:
        return ""
    trace = last_traceback(text)
    if said := of_traceback(trace) or _error(trace):
        return said
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:_MOST_CHARACTERS] if lines else ""


def of_last_words(text: str) -> str:
    """What C++ said before it aborted the process, else the place at which a fatal signal met Python; else empty."""
    if found := _TERMINATED.search(text):
        what = of_message(found[2].split("\nFatal Python error:")[0])
        return f"{found[1]}: {what}"[:_MOST_CHARACTERS]
    fatal, place = _FATAL.search(text), _FATAL_PLACE.search(text)
    if not fatal or not place:
        return ""
    where = f"{place[3]} ({Path(place[1]).name}:{place[2]})"
    return f"Fatal Python error: {fatal[1]} in {where}"[:_MOST_CHARACTERS]


def last_traceback(text: str) -> str:
    """The last traceback in what a program has said, with those it is chained to, and all that follows; else empty.

    One that is followed by much else was not the end.
    """
    text = _RANK.sub("", _BEHIND.sub("\\n", text))
    headers = [found.start() for found in _HEADER.finditer(text)]
    if not headers:  # Python does not say that it traces where it cannot read the program
        unread = list(_UNREAD.finditer(text))
        return text[unread[-1].start() :].rstrip() if unread else ""
    first = headers.pop()
    if sum(line[:1].strip() != "" for line in text[first:].splitlines()) > _MOST_LINES:
        return ""
    while headers and _CHAINED.search(text[headers[-1] : first].rstrip().rpartition("\n")[2]):
        first = headers.pop()
    return text[first:].rstrip()


def _error(block: str) -> str:
    """The error below one traceback; empty where none is found."""
    header = _HEADER.search(block)
    lines = (block[header.end() :] if header else block).splitlines()
    for number, line in enumerate(lines):
        below = header and line and not line[0].isspace()
        if below or (not header and _ERROR.match(line)):
            return _whole([one.strip() for one in lines[number:] if one.strip()])
    return ""


def _whole(lines: Sequence[str]) -> str:
    """The first line of an error's text; with the cause that a later line tells, where libraries put it there."""
    first, more = lines[0], ""
    if _LAST_ERROR in lines[:-1]:
        more = lines[lines.index(_LAST_ERROR) + 1]
    elif len(lines) > 1 and _PASSED_ON.search(first):
        more = lines[-1]
    return f"{first}; {more}"[:_MOST_CHARACTERS] if more else first[:_MOST_CHARACTERS]


def _telling(errors: Sequence[str]) -> str:
    """The error of a chain, in the order in which they were raised, that tells why the process died."""
    last, own = errors[-1], [error for error in errors if not tells_of_another(error)]
    if tells_of_another(last):
        return next((error for error in own if not _HANDLED.match(error)), last)
    if tells_of_another(errors[0]):  # what was raised while that was handled is a consequence
        return f"{errors[0]}; then {last}"[:_MOST_CHARACTERS]
    both = f"{own[0]}; then {last}"[:_MOST_CHARACTERS]
    return own[0] if own[0] == last or tells_of_another(both) else both
