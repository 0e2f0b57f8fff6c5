"""Names of process groups: torch's numbers, which go on from another million in each incarnation."""

from __future__ import annotations

import re

NAMES_PER_INCARNATION = 1_000_000
_NUMBER = re.compile(r"(\d{7,18})([# ].*)?", re.ASCII | re.DOTALL)


def shown_name(name: str) -> str:
    """The name that users are shown: the one that the same group had in the first incarnation."""
    found = _NUMBER.fullmatch(name)
    return f"{int(found[1]) % NAMES_PER_INCARNATION}{found[2] or ''}" if found else name
