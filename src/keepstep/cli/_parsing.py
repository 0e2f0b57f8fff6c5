"""What all verbs share: argparse with usage errors of one line that say what to do, and output as JSON."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from keepstep.core.errors import UsageError


class Parser(argparse.ArgumentParser):
    """The parser of ``keepstep COMMAND``: flags and arguments in any order, flags never shortened."""

    def __init__(self, command: str, description: str) -> None:
        super().__init__(prog=f"keepstep {command}", description=description, allow_abbrev=False)
        self._command = command

    def error(self, message: str) -> NoReturn:
        """Raise a UsageError that leads to the command's help."""
        raise UsageError(f"{self._command}: {message}; see `keepstep {self._command} --help`")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The values of all flags and arguments. Raises UsageError for one that is unknown, missing or wrong."""
        # Plain parse_args refuses RUN --json INCIDENT; the intermixed one loses "--" and takes flags after it.
        parse = self.parse_args if "--" in argv else self.parse_intermixed_args
        return parse(list(argv))

    def add_run(self, *, elsewhere: bool = False) -> None:
        """Add the argument that names a run. ``elsewhere``: its folder need not be here, see `reach_run`."""
        text = "the run's folder, or its name under ./runs"
        text += (
            "; or [ID@]HOST:PORT of a running job, whose secret KEEPSTEP_SECRET_FILE names"
            if elsewhere
            else ""
        )
        self.add_argument("run", metavar="RUN", help=text)

    def add_json(self, text: str) -> None:
        """Add ``--json``."""
        self.add_argument("--json", action="store_true", help=text)

    def add_number(self, flag: str, default: float | None, text: str, metavar: str = "S") -> None:
        """Add a flag that takes a number: of seconds, where ``metavar`` does not name another unit."""
        self.add_argument(flag, type=float, default=default, metavar=metavar, help=text)


def reach_run(run: str) -> None:
    """Where ``run`` names the controller of a run whose folder is not here, ask it. Raises KeepstepError."""
    if ":" in run:
        from keepstep.view.elsewhere import fetch_run, is_elsewhere

        if is_elsewhere(run):
            fetch_run(run)


def print_json(content: Any) -> None:
    """Print an object as one line of JSON."""
    import msgspec

    print(msgspec.json.encode(content).decode())


def number(kind: type[int] | type[float], low: float, high: float = math.inf) -> Callable[[str], float]:
    """An argparse type: a number of this kind from ``low`` to ``high``."""

    def read(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:
            bounds = f"less than {low:g}" if high == math.inf else f"not between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"{text} is {bounds}")
        return value

    read.__name__ = kind.__name__  # argparse puts it into "invalid int value"
    return read


def choose(
    command: str, about: str, verbs: Mapping[str, str], argv: Sequence[str], *flags: tuple[str, str]
) -> tuple[str, list[str]] | int:
    """The verb that ``argv`` begins with and the words after it; or an exit code, when help was printed.

    ``verbs``: a line of help for each verb; ``flags``: further flags of the command, with a line of help each.
    Raises UsageError where there is no such verb.
    """
    word, *rest = argv or ("",)
    if word in verbs:
        return word, rest
    if word in ("", "-h", "--help"):
        return _print_help(command, about, verbs, flags, failed=not word)
    what = "flag" if word.startswith("-") else "verb"
    raise UsageError(f"{word}: there is no such {what}{_meant(word, verbs)}; see `{command} --help`")


def _meant(word: str, verbs: Mapping[str, str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, verbs)
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def _print_help(
    command: str, about: str, verbs: Mapping[str, str], flags: Sequence[tuple[str, str]], *, failed: bool
) -> int:
    import sys

    flags = (*flags, ("-h, --help", f"show this help and exit; `{command} VERB --help` explains a verb"))
    width = max(map(len, (*verbs, *(flag for flag, _ in flags))))
    lines = [f"usage: {command} VERB ...", "", about, "", "verbs:"]
    lines += [f"  {verb:<{width}}  {text}" for verb, text in verbs.items()]
    lines += ["", "options:", *(f"  {flag:<{width}}  {text}" for flag, text in flags)]
    print("\n".join(lines), file=sys.stderr if failed else sys.stdout)
    return 2 if failed else 0
