"""How a pod has ended, and what that says of its job (docs/reference/exit-codes.md)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from keepstep.core.exit_codes import TEMPORARY_FAILURE
from keepstep.core.log_lines import one_line
from keepstep.kubernetes.objects import Pod

_TOLD = re.compile(r"keepstep: exit code (\d{1,3}) \((\w{1,40})\)")
_BLAMED = re.compile(r"; nodes blamed: ([^;]{1,20000})")
_MOST_TEXT = 1000
EndKind = Literal["finished", "again", "killed", "gone", "failed"]


@dataclass(frozen=True, slots=True)
class End:
    """How a pod has ended.

    Attributes:
        kind: ``finished``: so has the job. ``again``: this pod is to begin again, or all (75). ``killed``: its launcher
            was, alone for all that is known. ``gone``: the cluster has ended it. ``failed``: so has the job.
        text: its last message, in one line.
        category: what has ended the job, as keepstep told it; empty where it did not.
    """

    kind: EndKind
    text: str = ""
    category: str = ""


def end_of(pod: Pod) -> End | None:
    """How a pod has ended; None while it has not."""
    if pod.status.phase not in ("Succeeded", "Failed"):
        return None
    # The cluster gives its reason to the pod itself: Evicted, NodeLost, Preempting, …
    if pod.status.reason and pod.status.reason != "DeadlineExceeded":
        return End("gone", short(f"{pod.status.reason}: {pod.status.message}"))
    ended = pod.terminated
    if ended is None:
        return End("gone", short(pod.status.message or "its container has left no exit code"))
    told = _TOLD.match(ended.message)
    category = told[2] if told else ""
    text = short(ended.message) if told else f"exit code {ended.exit_code}"
    if ended.exit_code == 0:
        return End("finished", text)
    if pod.metadata.deletion_timestamp is not None:
        return End("gone", text)
    if pod.status.reason:
        return End("failed", short(f"{pod.status.reason}: {pod.status.message}"))
    if ended.exit_code == TEMPORARY_FAILURE:
        return End("again", text, category)
    # A launcher that was sent a signal, as a spare alone, ends with 128 + its number as well.
    killed = ended.exit_code > 128 and (told is None or category == "signal")
    return End("killed" if killed else "failed", text, category)


def blamed(text: str) -> str:
    """The nodes that a last message blames, as it has folded them; empty where it blames none."""
    found = _BLAMED.search(text)
    return found[1] if found else ""


def short(text: str) -> str:
    """Foreign text in one line of bounded length."""
    return one_line(" ".join(text.split(" ")))[:_MOST_TEXT].strip()
