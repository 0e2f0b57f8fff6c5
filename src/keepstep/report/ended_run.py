"""How a run has ended where its scheduler ended it, as ``RUN/end.json`` tells."""

from __future__ import annotations

from pathlib import Path

import msgspec

from keepstep.core.regular_files import read_regular
from keepstep.core.told import CauseClass

_MOST_BYTES = 1 << 20


class Cause(msgspec.Struct, rename={"cause_class": "class"}):
    """Class and kind as those of `core.told.Row`."""

    cause_class: CauseClass
    kind: str


class Ended(msgspec.Struct):
    """The end of a run that its scheduler ended."""

    exit_code: int
    reason: str
    cause: Cause


def read_end(run: Path) -> Ended | None:
    """How the scheduler ended a run; None where it did not, or the file does not say so."""
    try:
        return msgspec.json.decode(read_regular(run / "end.json", _MOST_BYTES), type=Ended)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
