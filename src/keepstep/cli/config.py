"""``keepstep config show``: the settings in force, and with ``--origin`` where each one comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from keepstep.cli._parsing import Parser, choose
from keepstep.core.config import config_path, resolve
from keepstep.launch.command.run_settings import SETTINGS

_SHOW = "Print every setting: default < file < environment < flag."


def main(argv: Sequence[str]) -> int:
    """Carry out the verb that follows ``config``."""
    about = "Show the settings in force and where each one comes from."
    chosen = choose("keepstep config", about, {"show": _SHOW}, argv)
    if isinstance(chosen, int):
        return chosen
    parser = Parser("config show", _SHOW)
    parser.add_argument("--origin", action="store_true", help="say where each value comes from")
    parser.add_json("print JSON")
    given = parser.parse(chosen[1])
    resolved = resolve(SETTINGS, environ=os.environ, path=config_path(os.environ))
    if given.json:
        entries = {
            item.setting.key: {"value": item.value, "origin": item.origin} if given.origin else item.value
            for item in resolved.values()
        }
        print(json.dumps(entries, indent=2))
        return 0
    lines = [f"{item.setting.key} = {json.dumps(item.value)}" for item in resolved.values()]
    width = max(map(len, lines))
    for line, item in zip(lines, resolved.values(), strict=True):
        print(f"{line:<{width}}  # {item.origin}" if given.origin else line)
    return 0
