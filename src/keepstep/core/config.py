"""Settings and where they come from: default < file (TOML) < environment (``KEEPSTEP_*``) < flag.

A room declares its settings beside the code that uses them, as a tuple of ``Setting``; ``resolve`` gives each
one its value and its origin. In the file a setting stands in the table of its room::

    [run]
    runs_dir = "/scratch/runs"
    join_timeout_s = 600
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from keepstep.core.errors import UsageError
from keepstep.core.home import home_folder
from keepstep.core.regular_files import read_regular

Value = str | int | float | bool

CONFIG_FILE = "KEEPSTEP_CONFIG"
_MOST_BYTES = 16 << 20
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. Its type is that of the default; a name with a unit ends in it (``_s``, ``_bytes``)."""

    table: str  # table of the TOML file, named after the room or verb
    name: str
    default: Value
    text: str  # one line on what the setting does

    @property
    def key(self) -> str:
        """The setting's name in the file and in messages, ``table.name``."""
        return f"{self.table}.{self.name}"

    @property
    def variable(self) -> str:
        """The environment variable that holds the setting."""
        return f"KEEPSTEP_{self.name.upper()}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setting with the value in force and its origin: ``default``, a path, a variable or ``flag``."""

    setting: Setting
    value: Value
    origin: str


def config_path(environ: Mapping[str, str]) -> Path | None:
    """The configuration file: ``$KEEPSTEP_CONFIG``, ``./keepstep.toml``, or the user's own; None without any.

    Raises:
        UsageError: ``$KEEPSTEP_CONFIG`` names a file that does not exist.
    """
    named = environ.get(CONFIG_FILE)
    if named:
        if not os.path.isfile(named):
            raise UsageError(f"{CONFIG_FILE}={named}: no such file; correct it or unset the variable")
        return Path(named)
    own, home = environ.get("XDG_CONFIG_HOME"), home_folder(environ)
    folders = [Path(own)] if own else [home / ".config"] if home else []
    for path in (Path("keepstep.toml"), *(folder / "keepstep" / "config.toml" for folder in folders)):
        if os.path.isfile(path):  # False where we may not look, as in another user's home
            return path
    return None


def read_file(
    path: Path, advice: str = f"correct the file or point {CONFIG_FILE} at another"
) -> dict[str, Any]:
    """The tables of a TOML file. ``advice``: what to do about one that is wrong.

    Raises:
        UsageError: the file cannot be read or is no TOML.
    """
    # Loaded here so that a run without a configuration file does not pay for a parser.
    try:
        import tomllib  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    try:
        text = read_regular(path, _MOST_BYTES).decode()
        return cast("dict[str, Any]", tomllib.loads(text))  # pyright: ignore[reportUnknownMemberType]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}; {advice}") from None


def resolve(
    settings: Sequence[Setting],
    *,
    environ: Mapping[str, str],
    flags: Mapping[str, Value | None] | None = None,
    path: Path | None = None,
) -> dict[str, Resolved]:
    """Every setting by name, with the value in force.

    ``flags``: values from the command line, None for flags that were not given. ``path``: the configuration file.

    Raises:
        UsageError: a value has the wrong type, or a table of the file has a key that is no setting.
    """
    tables = read_file(path) if path else {}
    known = {setting.key for setting in settings}
    for table in {setting.table for setting in settings}:
        entries = tables.get(table, {})
        if not isinstance(entries, dict):
            raise UsageError(f"{path}: {table} is no table; write [{table}] on a line of its own")
        for name in cast("dict[str, Any]", entries):
            if f"{table}.{name}" not in known:
                raise UsageError(f"{path}: no setting {table}.{name}; see `keepstep config show`")

    def in_force(setting: Setting) -> Resolved:
        flag, text = (flags or {}).get(setting.name), environ.get(setting.variable)
        if flag is not None:
            return Resolved(setting, flag, "flag")
        if text is not None:
            return Resolved(setting, _from_text(setting, text), setting.variable)
        table = tables.get(setting.table, {})
        if setting.name in table:
            return Resolved(setting, _from_file(setting, table[setting.name], path), str(path))
        return Resolved(setting, setting.default, "default")

    return {setting.name: in_force(setting) for setting in settings}


def _from_text(setting: Setting, text: str) -> Value:
    kind = type(setting.default)
    if kind is bool:
        word = text.strip().lower()
        if word in _TRUE or word in _FALSE:
            return word in _TRUE
        raise UsageError(f"{setting.variable}={text!r}: say 1 or 0")
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{setting.variable}={text!r}: not a number; unset it or give one") from None


def _from_file(setting: Setting, value: object, path: Path | None) -> Value:
    kind = type(setting.default)
    if isinstance(value, bool) == (kind is bool):
        if isinstance(value, kind):
            return value
        if kind is float and isinstance(value, int):
            return float(value)
    raise UsageError(f"{path}: {setting.key} = {value!r} is no {kind.__name__}; correct the file")
