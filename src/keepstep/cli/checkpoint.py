"""``keepstep checkpoint``: plan how often to save; look after what is on storage."""

from __future__ import annotations

import typer

from keepstep.cli._checkpoint_plan import plan

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback()
def _checkpoint() -> None:  # pyright: ignore[reportUnusedFunction]
    """Plan how often to save checkpoints; list, verify, export and prune those on storage."""


app.command()(plan)
