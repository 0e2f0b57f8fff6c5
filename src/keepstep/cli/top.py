"""``keepstep top``: a run, live in the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from keepstep.cli._parsing import Parser, reach_run
from keepstep.core.errors import RunError
from keepstep.core.log_lines import one_line

_ABOUT = (
    "Watch a run in the terminal: in words what is wrong and what to do, then pace, checkpoints, links and the worst "
    "ranks. q quits; j, k, arrows and Page keys scroll. Colours are left out where NO_COLOR is set."
)


def main(argv: Sequence[str]) -> int:
    """Show the run until q is pressed."""
    parser = Parser("top", _ABOUT)
    parser.add_run(elsewhere=True)
    run = parser.parse(argv).run
    elsewhere = f"`keepstep status {run}` prints the state once"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RunError(f"top needs a terminal, and this is none; {elsewhere}")
    try:
        import curses

        from keepstep.view.run_source import open_source
        from keepstep.view.top_program import run_top
    except ImportError as error:
        raise RunError(f"this Python has no curses ({error}); {elsewhere}") from error
    reach_run(run)
    source = open_source(run)
    try:
        run_top(source, run)
    except curses.error as error:
        term = one_line(os.environ.get("TERM", ""))
        raise RunError(f"the terminal (TERM={term!r}) cannot show this: {error}; {elsewhere}") from error
    return 0
