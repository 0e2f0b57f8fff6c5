"""The verbs of ``keepstep ctl`` that leave the job training: thresholds, watch, profile and checkpoint."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from keepstep import wire
from keepstep.cli._asking import ask
from keepstep.cli._parsing import Parser, number, reach_run
from keepstep.core.errors import RunError, UsageError
from keepstep.core.log_lines import one_line
from keepstep.core.ranges import expand_ranks
from keepstep.core.regular_files import open_regular
from keepstep.traces import open_run

Answer = TypeVar("Answer", bound=wire.Message)

_MOST_RANK = (1 << 20) - 1
_MOST_TEXT = 200  # characters that name 16 ranks
_LATER_S = 5.0  # the controller answers by itself when the time is over; so much longer it is waited for
_FILE = re.compile(r"traces/rank-[0-9]{5,7}-step-[0-9]{1,15}\.json\.gz", re.ASCII)
_DRY_RUN = "say what would be done, and do nothing"
_WAIT = "seconds to wait until it is done (default: %(default)g)"


def verb_of(argv: Sequence[str]) -> Callable[[Sequence[str]], int] | None:
    """The function of the verb that a command line has; None: it is another verb's."""
    words = [word for word in argv if not word.startswith("-")]
    return VERBS.get(words[1]) if len(words) > 1 else None


def thresholds(argv: Sequence[str]) -> int:
    """Show the thresholds of a running job, or change them."""
    about = (
        "Show the thresholds by which a running job is watched, or change them. What is changed outlives the "
        "controller, not the job; no worker is touched."
    )
    parser = _parser("thresholds", about, 30.0)
    text = "what is to be changed; without it, all are shown"
    parser.add_argument("changes", nargs="*", metavar="NAME=VALUE", help=text)
    text = "as the job was started: the names that are given, or all"
    parser.add_argument("--default", action="store_true", help=text)
    given = parser.parse(argv)
    run, changes = given.run, [_change(word, given.default) for word in given.changes]
    if len(changes) > 32:
        raise UsageError(f"keepstep ctl {run} thresholds: {len(changes)} changes at once; give 32 at most")
    answer = _ask(
        run,
        wire.Tune(tuple(changes), given.default, given.dry_run),
        wire.Tuned,
        given.timeout,
    )
    if answer.refused:
        raise RunError(f"{run}: not done (thresholds): {answer.refused}")
    if answer.done:
        print(one_line(f"{run}: {answer.done}"))
    if not given.dry_run:
        _print_thresholds(answer.rows)
    return 0


def _change(word: str, reset: bool) -> tuple[str, str]:
    """Name and value; the value is "" where the name alone says what is to be ``reset``."""
    name, equals, value = word.partition("=")
    if reset and equals:
        raise UsageError(f"{word[:80]}: give the name alone with --default")
    if not reset and (not equals or not name or not value):
        raise UsageError(f"{word[:80]}: give NAME=VALUE, for example hang-after=300")
    if len(name) > 100 or len(value) > 100:
        raise UsageError(f"{word[:40]}…: is too long for a threshold")
    return name, value


def _print_thresholds(rows: Sequence[wire.Threshold]) -> None:
    cells = [("NAME", "VALUE", "ORIGIN", "MEANING")]
    for row in rows:
        origin = f"order, was {row.start}" if row.origin == "order" else row.origin
        cells.append((row.name, row.value, origin, row.text))
    widths = (*(max(len(line[at]) for line in cells) for at in range(3)), 0)
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(one_line("  ".join(padded).rstrip()))


def watch(argv: Sequence[str]) -> int:
    """Have a running job watched, or not."""
    about = (
        "off: no verdicts, no remedies and no holds, until on; processes that die are told and recovered from as "
        "ever. on: what stood still or was slow meanwhile, and is over, is not told."
    )
    parser = _parser("watch", about, 30.0)
    parser.add_argument("on", choices=("on", "off"), metavar="on|off", help="whether the job is watched")
    given = parser.parse(argv)
    _order(given.run, "watch", wire.Watch(given.on == "on", given.dry_run), given.timeout)
    return 0


def profile(argv: Sequence[str]) -> int:
    """Trace a few steps of some ranks; 1 when there is no file of one of them."""
    about = (
        "Trace the next steps of some ranks with torch's profiler, on the host and on the GPU. The files lie in the "
        "folder traces of the run, on the node of each rank; Perfetto (ui.perfetto.dev) opens them."
    )
    parser = _parser("profile", about, 120.0)
    most = wire.MOST_TRACED_RANKS
    parser.add_argument("--ranks", required=True, metavar="RANKS", help=f"{most} ranks at most, e.g. 0,3")
    text = f"steps to trace, 1 to {wire.MOST_TRACED_STEPS} (default: %(default)d)"
    parser.add_argument(
        "--steps", type=number(int, 1, wire.MOST_TRACED_STEPS), default=5, metavar="N", help=text
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="of one rank: copy the trace to this file")
    given = parser.parse(argv)
    run, ranks = given.run, expand_ranks(given.ranks) if len(given.ranks) <= _MOST_TEXT else ()
    if not ranks or len(ranks) > most or max(ranks) > _MOST_RANK:
        raise UsageError(
            f"keepstep ctl {run} profile: --ranks {given.ranks[:80]}: give 1 to {most} ranks of the job"
        )
    if given.output and len(ranks) > 1:
        raise UsageError(f"keepstep ctl {run} profile: -o is of one rank; {len(ranks)} are given")
    if given.output and Path(given.output).is_dir():
        raise UsageError(f"keepstep ctl {run} profile: -o {given.output}: is a folder; give a file")
    answer = _ask(
        run,
        wire.TraceSteps(tuple(ranks), int(given.steps), given.timeout, given.dry_run),
        wire.Traced,
        given.timeout + _LATER_S,
    )
    if answer.refused:
        raise RunError(f"{run}: not done (profile): {answer.refused}")
    if answer.done:
        print(one_line(f"{run}: {answer.done}"))
    folder = open_run(run).path
    for one in answer.files:
        print(one_line(f"{run}: rank {one.rank}: {_outcome(one, folder)}"))
    written = [one for one in answer.files if not one.why]
    if given.output and written:
        _copy(folder, written[0], Path(given.output))
    return 0 if len(written) == len(answer.files) else 1


def _outcome(one: wire.TraceFile, folder: Path) -> str:
    if one.why:
        return f"no trace: {one.why}"
    here = folder / one.file if _FILE.fullmatch(one.file) else None
    size = f"{one.nbytes / (1 << 20):.1f} MiB, from step {one.step} on"
    if here is not None and here.is_file():
        return f"{here} ({size})"
    return f"{one.file} in the run's folder on {one.node} ({size})"


def _copy(folder: Path, one: wire.TraceFile, target: Path) -> None:
    if not _FILE.fullmatch(one.file):
        raise RunError(f"{one.file}: is no name of a trace; nothing was copied")
    try:
        with open_regular(folder / one.file) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    except OSError as error:
        where = f"the trace of rank {one.rank} is {one.file} in the run's folder on {one.node}"
        raise RunError(f"{target}: not written: {error.strerror or error}; {where}") from error


def checkpoint(argv: Sequence[str]) -> int:
    """Have the next step that all ranks save brought to storage."""
    about = (
        "Bring the next step that all ranks save to storage, whether it is due or not, and return once it is there. It "
        "takes a script that saves (keepstep.Session, keepstep.checkpoint) and --checkpoint-dir."
    )
    parser = _parser("checkpoint", about, 300.0)
    parser.add_argument("when", nargs="?", choices=("now",), metavar="now", help="may be said or left out")
    given = parser.parse(argv)
    order = wire.PersistNow(given.timeout, given.dry_run)
    _order(given.run, "checkpoint", order, given.timeout + _LATER_S)
    return 0


def _parser(verb: str, about: str, timeout_s: float) -> Parser:
    parser = Parser(f"ctl RUN {verb}", about)
    parser.add_run(elsewhere=True)
    parser.add_argument("verb", choices=(verb,), metavar=verb, help="this order")
    parser.add_argument("--dry-run", action="store_true", help=_DRY_RUN)
    seconds = number(float, 1.0, wire.MOST_WAIT_S)
    parser.add_argument("--timeout", type=seconds, default=timeout_s, metavar="S", help=_WAIT)
    return parser


def _order(run: str, verb: str, order: wire.Message, timeout_s: float) -> None:
    answer = _ask(run, order, wire.Operated, timeout_s)
    if answer.refused:
        raise RunError(f"{run}: not done ({verb}): {answer.refused}")
    print(one_line(f"{run}: {answer.done}"))


def _ask(run: str, order: wire.Message, kind: type[Answer], timeout_s: float) -> Answer:
    reach_run(run)
    return ask(
        run,
        order,
        kind,
        timeout_s,
        only="only a running job takes orders",
        gone=f"see keepstep status {run} for whether it was done",
    )


VERBS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "thresholds": thresholds,
    "watch": watch,
    "profile": profile,
    "checkpoint": checkpoint,
}
