"""The command line: one file per verb, loaded only when that verb is called.

A verb's module ``keepstep.cli.VERB`` holds either a function named after the verb (its parameters are
annotated for typer; an integer that it returns is the exit code) or a typer application named ``app`` when
the verb has sub-commands. ``run`` parses like torchrun (script last, everything after it untouched), so it is
handed its arguments as they are and loads neither typer nor rich; the launcher stays small.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

USAGE = 2

VERBS = {
    "run": "Run a training job as torchrun does, watch it, and print a verdict when it slows, hangs or dies.",
    "status": "Show the state of a run: every rank, and what is open.",
    "report": "Print the incidents of a run, as text or JSON, with plots.",
    "ctl": "Suspend, resume, restart or stop a running job by hand.",
    "validate": "Hold a running job for seconds, test its devices and links, let it go on.",
    "analyze": "Say what went wrong from traces that are there: dumps, logs and tables of other tools, too.",
    "plan": "Say how much of a day a job loses to failures, with and without keepstep.",
    "checkpoint": "Plan how often to save checkpoints; list, verify, export and prune those on storage.",
    "export": "Write a run as a Chrome trace that Perfetto opens.",
    "config": "Show the settings in force and where each one comes from.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code. User errors are one line on stderr and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    from keepstep.core.errors import KeepstepError
    from keepstep.core.log_lines import one_line

    try:
        if arguments and arguments[0] == "run":
            from keepstep.cli import run

            return run.main(arguments[1:])
        return _typer_verb(arguments)
    except KeepstepError as error:
        print(f"keepstep: {one_line(str(error))}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left (`| head`); keep the interpreter's last flush from complaining.
        sys.stdout = None
        return 141


def _typer_verb(arguments: Sequence[str]) -> int:
    wanted = next((word for word in arguments if not word.startswith("-")), "")
    try:
        code = _application(wanted)(args=list(arguments), prog_name="keepstep", standalone_mode=True)
    except SystemExit as stop:
        code = stop.code
    return code if isinstance(code, int) else 0


def _application(wanted: str) -> typer.Typer:
    """The typer application with the ``wanted`` verb loaded; of the others it knows name and help only."""
    import typer

    from keepstep import __version__

    def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
        """Watch a distributed PyTorch job from outside the script; name the rank or link that slows it."""
        if version:
            print(f"keepstep {__version__}")
            raise typer.Exit()

    app = typer.Typer(
        add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    app.callback(invoke_without_command=True)(root)
    for verb, summary in VERBS.items():
        if verb != wanted:
            app.command(verb, help=summary)(_not_loaded)
            continue
        module = import_module(f"keepstep.cli.{verb}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=verb, help=summary)
        else:
            app.command(verb, short_help=summary)(_exit_with(getattr(module, verb)))
    return app


def _exit_with(verb: Callable[..., int | None]) -> Callable[..., None]:
    """Make the integer that a verb returns the exit code."""
    import functools

    import typer

    @functools.wraps(verb)
    def call(*args: object, **kwargs: object) -> None:
        raise typer.Exit(verb(*args, **kwargs) or 0)

    return call


def _not_loaded() -> None:
    """Stands for a verb that was not called: only its name and help are shown."""
