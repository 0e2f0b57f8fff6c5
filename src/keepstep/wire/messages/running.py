"""Messages by which an operator orders something of a job that goes on training: thresholds, watching, traces, a save.

The first half passes between the operator and the controller, the second between the controller and the agents.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from keepstep.wire.messages import limits
from keepstep.wire.messages.limits import Message

MOST_TRACED_RANKS = 16
MOST_TRACED_STEPS = 50
MOST_WAIT_S = 3600.0  # longest that an operator may wait for a trace, or for a step to be on storage
_MOST_THRESHOLDS = 32

_Wait = Annotated[float, msgspec.Meta(ge=1.0, le=MOST_WAIT_S)]
_Steps = Annotated[int, msgspec.Meta(ge=1, le=MOST_TRACED_STEPS)]
_Changes = Annotated[tuple[tuple[limits.Label, limits.Label], ...], msgspec.Meta(max_length=_MOST_THRESHOLDS)]
PersistState = Literal["ready", "waits", "on the way", "there", "unable"]
_Since = Annotated[float, msgspec.Meta(ge=0, le=1 << 34)]  # Unix time
_Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


# --- an operator and the controller


class Tune(Message, frozen=True):
    """An operator wants other thresholds, or to see them. Answered by `Tuned`.

    ``changes``: names and values. ``reset``: those named, or all if none is, are to be as the job was started.
    """

    changes: _Changes = ()
    reset: bool = False
    only_say: bool = False  # say what would be done, and do nothing


class Threshold(msgspec.Struct, frozen=True, array_like=True):
    """One threshold as it is now."""

    name: limits.Label
    value: limits.Label
    origin: Literal["default", "flag", "order"]
    start: limits.Label  # its value when the job was started
    text: limits.Line  # what it is, in words


class Tuned(Message, frozen=True):
    """Answer to `Tune`: all thresholds, and what was done; or one line that says why nothing was."""

    rows: Annotated[tuple[Threshold, ...], msgspec.Meta(max_length=_MOST_THRESHOLDS)] = ()
    done: limits.Line = ""
    refused: limits.Line = ""


class Watch(Message, frozen=True):
    """An operator wants the job to be watched, or not. Answered by `Operated`."""

    on: bool
    only_say: bool = False


class TraceSteps(Message, frozen=True):
    """An operator wants traces of the next ``steps`` of these ranks. Answered by `Traced`."""

    ranks: Annotated[tuple[limits.Rank, ...], msgspec.Meta(max_length=MOST_TRACED_RANKS)]
    steps: _Steps
    within_s: _Wait
    only_say: bool = False


class TraceFile(msgspec.Struct, frozen=True, array_like=True):
    """What has become of one rank's trace: the file in the run's folder on its node, or ``why`` there is none."""

    rank: limits.Rank
    node: limits.Host
    step: int = -1  # the first one traced
    file: limits.Line = ""
    nbytes: int = 0
    why: limits.Line = ""


class Traced(Message, frozen=True):
    """Answer to `TraceSteps`: the files, or one line that says why nothing was traced or what would be."""

    files: Annotated[tuple[TraceFile, ...], msgspec.Meta(max_length=MOST_TRACED_RANKS)] = ()
    done: limits.Line = ""
    refused: limits.Line = ""


class PersistNow(Message, frozen=True):
    """An operator wants the next saved step on storage, due or not. Answered by `Operated` once it is there."""

    within_s: _Wait
    only_say: bool = False


# --- the controller and the agents


class Standing(Message, frozen=True):
    """The orders of an operator that hold until they are taken back.

    To agents; they tell them to a controller that is started later, perhaps on a node without this run's files. The one
    with the highest ``number`` counts.
    """

    number: _Number
    off_since_unix_s: _Since = 0.0  # since when the job is not watched; 0: it is
    thresholds: _Changes = ()


class TraceRanks(Message, frozen=True):
    """Have these ranks trace their next ``steps``, for ``for_s`` at most. Answered by `RankTraces`.

    Without ranks the order is over.
    """

    number: _Number
    ranks: Annotated[tuple[limits.Rank, ...], msgspec.Meta(max_length=MOST_TRACED_RANKS)] = ()
    steps: Annotated[int, msgspec.Meta(ge=0, le=MOST_TRACED_STEPS)] = 0
    for_s: Annotated[float, msgspec.Meta(ge=0, le=MOST_WAIT_S)] = 0.0


class RankTrace(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank is with its trace."""

    rank: limits.Rank
    state: Literal["ordered", "tracing", "writing", "written", "failed"] = "ordered"
    step: int = -1
    file: limits.Line = ""
    nbytes: int = 0
    why: limits.Line = ""


class RankTraces(Message, frozen=True):
    """How far the ranks of a node are with their traces, sent when that has changed."""

    number: _Number
    node_rank: int
    ranks: Annotated[tuple[RankTrace, ...], msgspec.Meta(max_length=MOST_TRACED_RANKS)]


class Persist(Message, frozen=True):
    """Have the ranks bring their first saved step from ``key`` on to storage. Answered by `Persisting`.

    ``key`` 0: only say which step was saved last.
    """

    number: _Number
    key: limits.KeyOrNone = 0


class Persisting(Message, frozen=True):
    """How far a node is with a `Persist`, sent when that has changed.

    ``state``: "ready" is the answer to a question; then the order is "waits", "on the way" (saved here), "there" (whole
    on storage); "unable" says ``why``.
    """

    number: _Number
    node_rank: int
    state: PersistState
    key: limits.KeyOrNone = 0  # the newest one saved here, or the one that is on its way
    steps_s: float = 0.0  # how fast the numbers of saved steps grow here, in steps a second
    why: limits.Line = ""
