"""The class and kind of an error, where a restart is decided by them: of one line, without all the words around it."""

from __future__ import annotations

import re

from keepstep.core.told import CauseClass
from keepstep.detect.own_tables import matcher_in_force, own_matcher

# The tables are read for errors of these words only, which takes 0.1 s: other restarts are not to wait for that.
_DECISIVE = re.compile(
    r"import|no module|syntax|indentation|taberror|shared object|out of memory|space left|quota|stale|"
    r"read-only file|endpoint is not connected|input/output",
    re.IGNORECASE,
)
_HARDWARE = re.compile(
    r"cuda|\bhip\b|rocm|nccl|nvlink|nvml|\becc\b|xid|uncorrect|mlx5|infiniband|bus error", re.IGNORECASE
)
_IMPORTS = re.compile(r"import|no module|shared object", re.IGNORECASE)
_PASSING = re.compile(r"input/output|stale|endpoint is not|timed out|remote i/o|too many open", re.IGNORECASE)


def kind_of(error: str) -> tuple[CauseClass, str] | None:
    """Class and kind of a cause (`docs/design/why.md`); None: no decision hangs on them, or no row knows the error."""
    if not _DECISIVE.search(error) and own_matcher().match(error) is None:
        return None
    if _IMPORTS.search(error) and _PASSING.search(error):
        return None  # storage did not answer, so that what is there could not be read
    found = matcher_in_force().match(error)
    if found is None or found[0].role != "cause":
        return None
    return found[0].cause_class, found[0].kind


def speaks_of_hardware(error: str) -> bool:
    """Whether an error is about what a check of its node may show: a GPU, a link, memory."""
    if not _HARDWARE.search(error) and own_matcher().match(error) is None:
        return False
    found = matcher_in_force().match(error)
    return found is not None and found[0].cause_class == "node"
