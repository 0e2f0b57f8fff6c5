"""What spares are told that the workers of another node import. No secret that a script sets goes over the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from keepstep import wire
from keepstep.detect.secrets import blanked


def for_spares(modules: Sequence[str], environment: Mapping[str, str]) -> wire.Imports | None:
    """The message; None where spares had better import nothing ahead.

    That is where a variable that the script sets before its imports looks like a secret, or is too long to be told:
    without it the imports might do something else.
    """
    if any(blanked(text) != text for text in map("=".join, environment.items())):
        return None
    names = [name for name in modules if len(name) <= wire.MOST_LABEL][: wire.MOST_MODULES]
    imports = wire.Imports(tuple(names), tuple(environment.items()))
    try:
        return msgspec.convert(msgspec.to_builtins(imports), wire.Imports)
    except msgspec.ValidationError:
        return None
