"""``keepstep why``: what failed, who, and what to do, from the logs of any launcher."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepstep.cli._parsing import Parser, print_json
from keepstep.core.errors import UsageError
from keepstep.core.incident import FailureCause, Incident, SpokenLine
from keepstep.core.log_lines import one_line
from keepstep.core.told import Failure, Row, Stretch, Told, Words, like
from keepstep.detect.failure_rows import RowMatcher, rows_of_file, shipped_rows
from keepstep.detect.own_tables import named_tables
from keepstep.detect.prefixes import spoken
from keepstep.detect.secrets import blanked
from keepstep.locate.failure import explain
from keepstep.locate.new_lines import by_comparison, to_compare
from keepstep.report.cause_rows import followed_rows
from keepstep.report.ended_run import Ended, end_of, read_end
from keepstep.report.failure_page import as_json, page
from keepstep.report.incidents import read_incidents
from keepstep.report.shown_stretches import shown, stretches_as_json
from keepstep.report.verdict import render
from keepstep.report.wording import who
from keepstep.traces.failure_log import lines_of, read_words, sightings
from keepstep.traces.log_stretches import stretches_of_logs, stretches_of_run

_LONGEST_TRACEBACK_LINES = 200
_TELLING = ("cause", "suspect", "exception", "outcome")

_ABOUT = (
    "Say why a job failed, who caused it and what to do, from its logs, whoever launched it. "
    "Exit code 0: nothing failed, 1: something did, 2: cannot tell."
)


def main(argv: Sequence[str]) -> int:
    """Explain a failure; 1 when there is one."""
    parser = Parser("why", _ABOUT)
    text = "a log, a folder with the logs of ranks or nodes, or a run of keepstep"
    parser.add_argument("path", type=Path, metavar="PATH", nargs="?", help=text)
    parser.add_argument(
        "incident", type=int, nargs="?", metavar="INCIDENT", help="of a run: the incident's number"
    )
    parser.add_argument("--explain", metavar="LINE", help="show the row of the tables that a line matches")
    text = "a table of own rows, which come before keepstep's; may be repeated"
    parser.add_argument("--table", metavar="FILE", action="append", default=[], help=text)
    text = "add the lines behind the verdict: what ranks wrote around them, as far as it was kept"
    parser.add_argument("--lines", action="store_true", help=text)
    text = "a log, or folder of logs, of an earlier or healthy run: what it says is no cause; may be repeated"
    parser.add_argument("--healthy", type=Path, metavar="PATH", action="append", default=[], help=text)
    parser.add_json('print {"class": …, "sub": …, "root_line": …, "culprits": […]} instead of text')
    given = parser.parse(argv)
    tables = (*given.table, *named_tables(os.environ))
    own = tuple(row for table in tables for row in rows_of_file(table))
    matcher = RowMatcher((*own, *shipped_rows()))
    if given.explain is not None:
        return _explain(given.explain, matcher)
    if given.path is None:
        raise UsageError("why wants a PATH, or --explain LINE; see `keepstep why --help`")
    path = _run_named(given.path)
    if path is not None:
        return _explain_run(path, given.incident, matcher, json=given.json, lines=given.lines)
    if given.incident is not None:
        raise UsageError(f"{given.path}: is no run of keepstep, so that it has no incident {given.incident}")
    return explain_logs(given.path, matcher, given.healthy, json=given.json, lines=given.lines)


def explain_logs(
    path: Path, matcher: RowMatcher, healthy: Sequence[Path] = (), *, json: bool, lines: bool = False
) -> int:
    """Print why the job failed whose logs are at a path, with the ``lines`` behind it; 1 when it did.

    ``healthy``: logs of runs that did not fail.
    """
    failure, words = failure_in(path, matcher, healthy)
    stretches = stretches_of_logs(path, failure) if lines else []
    if json:
        print_json(as_json(failure) | ({"lines": stretches_as_json(stretches)} if lines else {}))
    elif stretches:
        print(page(failure, words, str(path)), shown(stretches), sep="\n\n")
    else:
        print(page_of(path, failure, words))
    return 1 if failure.cause_class else 0


def failure_in(path: Path, matcher: RowMatcher, healthy: Sequence[Path] = ()) -> tuple[Failure, list[Words]]:
    """The failure that logs tell, and their words. Raises TraceError where they cannot be read.

    ``healthy``: logs of other runs, which tell of no failure; only looked through where no row knows the cause.
    """
    words = read_words(path, matcher)
    failure = explain(words)
    new = to_compare(failure, words)
    if not new:
        return failure, words
    wanted = [like(one.text) for one in new]
    others = sightings(healthy, wanted) if healthy else None
    return by_comparison(failure, new, sightings([path], wanted), others), words


def page_of(path: Path, failure: Failure, words: Sequence[Words]) -> str:
    """The page about a failure, with the traceback out of its log."""
    return page(failure, words, str(path), _traceback(path, failure.root))


def _traceback(path: Path, root: Told | None) -> list[str]:
    """The lines of the root's traceback, those of other speakers left out."""
    if root is None or not root.begins or root.number - root.begins > _LONGEST_TRACEBACK_LINES:
        return []
    lines = lines_of(path, root.source, root.begins, root.number)
    return [line for line in lines if spoken(line[:400]).speaker.label in ("", root.speaker.label)]


def _run_named(path: Path) -> Path | None:
    """The folder of a run of keepstep, by its path or its name under ./runs; None where it is none."""
    for folder in (path, Path("runs") / path):
        if (folder / "run.json").is_file():
            return folder
    return None


def _explain_run(path: Path, number: int | None, matcher: RowMatcher, *, json: bool, lines: bool) -> int:
    """Print the last incident of a run in which processes died, or the one of this number."""
    known = [one for one in read_incidents(path / "incidents") if one.has_deaths]
    ended = read_end(path) if number is None else None
    if ended is not None:
        return _explain_end(path, ended, matcher, json=json)
    chosen = [one for one in known if number is None or one.number == number]
    if number is not None and not chosen:
        numbers = ", ".join(str(one.number) for one in known) or "none"
        raise UsageError(f"{path}: no death in incident {number} (incidents with deaths: {numbers})")
    for incident in (_with_cause(one, matcher) for one in chosen[-1:]):
        stretches, missing = stretches_of_run(path, incident, matcher) if lines else ([], [])
        if json:
            more = {"lines": stretches_as_json(stretches), "lines_missing": missing} if lines else {}
            print_json(_as_json(incident) | more)
        else:
            print(render(incident, run=str(path)))
            if lines:
                print(_behind(incident, stretches, missing))
    return 1 if chosen else _explain_none(path, json=json)


def _explain_none(path: Path, *, json: bool) -> int:
    """Print that no incident has deaths; 1 where the job has failed all the same."""
    end = end_of(path)
    has_failed = end is not None and end.exit_code != 0 and end.category not in ("stopped", "signal")
    if json:
        reason = blanked(end.reason) if end is not None and has_failed else ""
        named = {"class": "other", "sub": "unknown"} if has_failed else {"class": "none", "sub": ""}
        print_json({**named, "root_line": reason, "culprits": []})
    elif end is not None and has_failed:
        told = f"{path}: the job failed: {end.reason} (exit code {end.exit_code}); no incident tells why"
        print(one_line(blanked(f"{told}: its logs may, `keepstep why LOGS`")))
    else:
        print(f"nothing failed: {path} has no incident with deaths")
    return int(has_failed)


def _explain_end(path: Path, ended: Ended, matcher: RowMatcher, *, json: bool) -> int:
    """Print that the scheduler has ended a run."""
    row = next((row for row in matcher.rows if row.role == "cause" and row.kind == ended.cause.kind), None)
    title, advice = (row.title, row.advice) if row is not None else (ended.cause.kind, "")
    if json:
        told = {"class": ended.cause.cause_class, "sub": ended.cause.kind, "root_line": blanked(ended.reason)}
        print_json({**told, "culprits": [], "title": title, "advice": advice, "missing": []})
        return 1
    rows = [
        ("ENDED", f"{path}  exit code {ended.exit_code}"),
        ("cause", f"{ended.cause.cause_class}: {title}   confidence high"),
        ("culprit", "none: the scheduler has ended the job"),
        ("first", blanked(ended.reason)),
        ("advice", advice),
    ]
    print("\n".join(one_line(f"{label:<9} {text}") for label, text in rows if text))
    return 1


def _behind(incident: Incident, stretches: Sequence[Stretch], missing: Sequence[str]) -> str:
    """The lines behind the verdict on an incident."""
    rows = followed_rows(incident.cause) if incident.cause is not None else []
    rows += [("missing", text) for text in missing]
    parts = ["\n".join(one_line(f"{label:<9} {text}") for label, text in rows), shown(stretches)]
    return "\n".join(f"\n{part}" for part in parts if part)


def _with_cause(incident: Incident, matcher: RowMatcher) -> Incident:
    """The incident with a cause by its own words, where it was written without one, as before schema 2."""
    said = [incident.summary, *incident.evidence, *(one.detail for one in incident.culprits)]
    for text in said if incident.cause is None else ():
        found = matcher.match(text)
        if found is not None and found[0].role in _TELLING:
            row = found[0]
            first = SpokenLine(text)
            cause = FailureCause(row.cause_class, row.kind, row.title, "medium", row.advice, row.name, first)
            return replace(incident, cause=cause)
    return incident


def _as_json(incident: Incident) -> dict[str, Any]:
    cause, first = incident.cause, incident.cause.first if incident.cause else None
    return {
        "class": cause.cause_class if cause else "other",
        "sub": cause.kind if cause else "unknown",
        "root_line": blanked(first.text if first else incident.summary),
        "culprits": [who(one).replace("  ", " on ") for one in incident.culprits],
        "title": cause.title if cause else "",
        "advice": cause.advice if cause else "",
        "missing": [*(cause.missing if cause else ()), *incident.missing],
    }


def _explain(line: str, matcher: RowMatcher) -> int:
    found = matcher.match(spoken(line).text)
    if found is None:
        print("no row of the tables matches this line")
        return 1
    row, places = found
    print("\n".join(_shown(row, places)))
    return 0


def _shown(row: Row, places: dict[str, str]) -> list[str]:
    """The fields of a row, one a line."""
    fields = [
        ("row", f"{row.name}  ({row.origin})"),
        ("class", f"{row.cause_class}, {row.kind}"),
        ("title", row.title),
        ("role", row.role),
        ("blames", ", ".join([row.blames, *(f"{name} {blanked(value)}" for name, value in places.items())])),
        ("advice", row.advice),
        ("example", row.example),
        ("not", row.near),
        ("source", f"{row.source} ({row.licence})" if row.licence else row.source),
    ]
    return [f"{name:<9} {value}" for name, value in fields if value]
