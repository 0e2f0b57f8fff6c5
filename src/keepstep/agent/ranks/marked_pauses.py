"""The pauses of a training thread: evaluations, checkpoints and holds, by their phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keepstep.agent.ranks.event_buffer import Rows, chosen
from keepstep.agent.ranks.intervals import NOTHING, Union, clipped
from keepstep.core.events import Kind, Phase

_PHASE = int(Kind.PHASE)
_EVALUATION, _CHECKPOINT, _HOLD = (int(code) for code in (Phase.EVALUATION, Phase.CHECKPOINT, Phase.HOLD))
PAUSES = (_EVALUATION, _CHECKPOINT, _HOLD)


@dataclass(slots=True)
class Marker:
    """A finished optimizer step."""

    number: int  # counted from 0 over the whole ring
    ticket: int
    start_ns: int
    end_ns: int
    thread: int


def pauses_in(rows: Rows, start_ns: int, end_ns: int, last: Marker | None) -> tuple[Union, int, int]:
    """The union of the training thread's pauses, and the time of evaluation and of checkpoints.

    ``last``: the iteration's last optimizer step, if it has any.
    """
    phases = rows["kind"] == _PHASE
    unions: list[Union] = []
    for code in PAUSES:
        found = chosen(rows, phases & (rows["op"] == code))
        if last is not None and len(found):
            # Other threads (asynchronous checkpoints) do not pause the training. A pause around an optimizer step is
            # not real either: a model was left in eval mode.
            ends = found["end_ns"]
            held = (ends == 0) | (ends > last.start_ns)
            found = found[(found["thread"] == last.thread) & ~(held & (found["start_ns"] < last.start_ns))]
        if not len(found):
            unions.append(NOTHING)
            continue
        ends = np.where(found["end_ns"] == 0, end_ns, found["end_ns"])
        unions.append(Union(*clipped(found["start_ns"], ends, start_ns, end_ns)))
    evaluation, checkpoint, hold = unions
    joined = evaluation.joined(checkpoint).joined(hold)
    return joined, evaluation.less(checkpoint), checkpoint.total_ns


def outside(rows: Rows, pauses: Union) -> Rows:
    """The records that did not begin inside a pause."""
    starts: NDArray[np.int64] = rows["start_ns"]
    place = np.searchsorted(pauses.starts, starts, "right") - 1
    inside = (place >= 0) & (starts < pauses.ends[place])
    return chosen(rows, ~inside)


def checkpoints_in(rows: Rows, start_ns: int, end_ns: int, markers: Sequence[Marker]) -> Union | None:
    """The union of the training thread's checkpoints; None if there may be other pauses.

    ``markers``: all optimizer steps from ``start_ns`` on, at least one. A checkpoint around one of them, or one that
    goes on after ``end_ns``, may be none.
    """
    phases = chosen(rows, (rows["kind"] == _PHASE) & (rows["thread"] == markers[0].thread))
    if np.isin(phases["op"], (_EVALUATION, _HOLD)).any():
        return None
    found = phases[phases["op"] == _CHECKPOINT]
    begun = np.array([marker.start_ns for marker in markers], np.int64)
    around = np.searchsorted(begun, found["start_ns"]) != np.searchsorted(begun, found["end_ns"])
    if around.any() or bool((found["end_ns"] > end_ns).any()):  # around: also where the end is 0
        return None
    return Union(*clipped(found["start_ns"], found["end_ns"], start_ns, end_ns))
