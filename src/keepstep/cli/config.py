"""``keepstep config show``: the settings in force, and with ``--origin`` where each one comes from."""

from __future__ import annotations

import json
import os

import typer

from keepstep.core.config import config_path, resolve
from keepstep.launch.command.settings import SETTINGS

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _config() -> None:  # pyright: ignore[reportUnusedFunction]
    """Show the settings in force and where each one comes from."""


@app.command()
def show(
    origin: bool = typer.Option(False, "--origin", help="Say where each value comes from."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Print every setting: default < file < environment < flag."""
    resolved = resolve(SETTINGS, environ=os.environ, path=config_path(os.environ))
    if as_json:
        entries = {
            item.setting.key: {"value": item.value, "origin": item.origin} if origin else item.value
            for item in resolved.values()
        }
        print(json.dumps(entries, indent=2))
        return
    lines = [f"{item.setting.key} = {json.dumps(item.value)}" for item in resolved.values()]
    width = max(map(len, lines))
    for line, item in zip(lines, resolved.values(), strict=True):
        print(f"{line:<{width}}  # {item.origin}" if origin else line)
