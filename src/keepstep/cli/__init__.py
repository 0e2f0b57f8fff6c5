"""The command line: one file per verb, loaded only when that verb is called.

A verb's module ``keepstep.cli.VERB`` holds ``main``: it takes the words after the verb and gives the exit code.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib import import_module

USAGE = 2

VERBS = {
    "run": "Run a training job as torchrun does, watch it, and print a verdict when it slows, hangs or dies.",
    "slurm": "Submit a job to Slurm, or run it in an allocation, and end with the job's own exit code.",
    "operator": "Make the pods of training jobs in Kubernetes again and elsewhere, and tell of bad nodes.",
    "check": "Say whether this node, or all nodes of a job to be, are fit to train.",
    "ls": "List runs: those that live on this machine, those in a folder, and which are in trouble.",
    "top": "Watch a run in the terminal: what is wrong, the worst ranks and links, checkpoints.",
    "status": "Show the state of a run: every rank, and what is open.",
    "report": "Print the incidents of a run, as text or JSON, with plots.",
    "serve": "Show a run as a page in a browser, live or ended, and its metrics to Prometheus.",
    "ctl": "Order a running job by hand: suspend, restart, stop, move nodes; thresholds, watching, traces, a save.",
    "validate": "Hold a running job for seconds, test its devices and links, let it go on.",
    "analyze": "Say what went wrong from traces that are there: dumps, logs and tables of other tools, too.",
    "why": "Say why a job failed, who caused it and what to do, from logs of any launcher.",
    "plan": "Say how much of a day a job loses to failures, with and without keepstep.",
    "checkpoint": "Plan how often to save checkpoints; list, verify, export and prune those on storage.",
    "export": "Write a run as a trace that Perfetto opens, with pace and incidents.",
    "config": "Show the settings in force and where each one comes from.",
}
_ABOUT = "Watch a distributed PyTorch job from outside the script; name the rank or link that slows it."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. User errors are one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal of another encoding shows an arrow as \u2192
            stream.reconfigure(errors="backslashreplace")
    from keepstep.core.errors import KeepstepError
    from keepstep.core.log_lines import one_line

    try:
        return _run_verb(arguments)
    except KeepstepError as error:
        print(f"keepstep: {one_line(str(error))}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of the output has ended (as `head` does): the interpreter must not flush to it at exit.
        sys.stdout = None
        return 141


def _run_verb(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        from keepstep import __version__

        print(f"keepstep {__version__}")
        return 0
    from keepstep.cli._parsing import choose

    chosen = choose("keepstep", _ABOUT, VERBS, arguments, ("--version", "print the version and exit"))
    if isinstance(chosen, int):
        return chosen
    verb, rest = chosen
    try:
        return import_module(f"keepstep.cli.{verb}").main(rest)
    except SystemExit as stop:  # argparse has printed the verb's help
        return stop.code if isinstance(stop.code, int) else 0
