"""The states of ranks as they were just before the first of them died of what another did.

A rank that fails in an operation waited in it until then: a timeout or a lost connection ends the wait, not its cause.
The launcher ends the others within moments, so that their rings show where they were.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from keepstep.core.events import MESSAGES, ends_of
from keepstep.core.evidence import Evidence
from keepstep.core.summary import OpInFlight, RankState, StreamProgress
from keepstep.locate._left import left_well

_PATIENCE_S = 1.0  # an operation that failed sooner was not given up for a timeout
_Key = tuple[str, int, int, int, int]  # group, op (0 for collectives), source, target, sequence number


def as_they_waited(evidence: Evidence, *, timed_out: bool) -> list[RankState]:
    """The states with operations that failed as operations in flight; all ranks are alive that have not left.

    ``timed_out``: ranks had lost patience, not their connections. Then who entered an operation only after another had
    given it up was not in it.
    """
    gave_up = _given_up(evidence) if timed_out else {}
    left = left_well(evidence)
    return [s if s.rank in left else _before(s, evidence, gave_up) for s in evidence.states]


def waited_s(flight: OpInFlight) -> float:
    """How long a rank was in an operation that failed; 0 where it has not failed."""
    return max(flight.failed_s - flight.since_s, 0.0) if flight.failed_s else 0.0


def _given_up(evidence: Evidence) -> dict[_Key, tuple[str, float]]:
    """For each operation that failed on a rank, on which node the first one was, and when, by its clock."""
    first: dict[_Key, tuple[str, float]] = {}
    for state in evidence.states:
        node = evidence.nodes.get(state.rank, "")
        for flight in state.failed:
            if waited_s(flight) < _PATIENCE_S:
                continue
            key = _key(flight, state.rank)
            since = first.get(key)
            if since is None or _later_s(evidence, since, (node, flight.failed_s)) < 0:
                first[key] = node, flight.failed_s
    return first


def _before(state: RankState, evidence: Evidence, gave_up: dict[_Key, tuple[str, float]]) -> RankState:
    node = evidence.nodes.get(state.rank, "")
    inside: list[OpInFlight] = []
    late: list[OpInFlight] = []
    for flight in (*state.in_flight, *state.failed):
        end = gave_up.get(_key(flight, state.rank))
        is_late = end is not None and 0 < _later_s(evidence, end, (node, flight.since_s)) < math.inf
        (late if is_late else inside).append(flight)
    if state.alive and not state.failed and not late:
        return state
    streams = tuple(_without(stream, late, state.failed) for stream in state.streams)
    last_s = max((flight.since_s for flight in inside), default=state.last_progress_s)
    return replace(
        state,
        alive=True,
        in_flight=tuple(sorted(inside, key=lambda flight: flight.since_s)),
        failed=(),
        streams=streams,
        last_progress_s=min(last_s, state.last_progress_s),
    )


def _without(
    stream: StreamProgress, late: Sequence[OpInFlight], failed: Sequence[OpInFlight]
) -> StreamProgress:
    """A stream without operations that were entered too late; those that failed are not complete."""
    entered = [one.seq for one in late if _is_of(one, stream)]
    open_ = [one.seq for one in (*late, *failed) if _is_of(one, stream)]
    started = min([stream.started, *(seq - 1 for seq in entered)])
    return replace(
        stream, started=started, completed=min([stream.completed, started, *(seq - 1 for seq in open_)])
    )


def _is_of(flight: OpInFlight, stream: StreamProgress) -> bool:
    message = flight.op in MESSAGES
    same = flight.group == stream.group and flight.peer == stream.peer
    return same and (flight.op == stream.op if message else stream.op not in MESSAGES)


def _key(flight: OpInFlight, rank: int) -> _Key:
    message = flight.op in MESSAGES
    # A message is one operation for both ends.
    return flight.group, int(message), *ends_of(flight.op, rank, flight.peer), flight.seq


def _later_s(evidence: Evidence, first: tuple[str, float], second: tuple[str, float]) -> float:
    """How much later the second moment certainly is; each is a node and a time on its clock.

    Negative where it is not, infinite where the clocks cannot be compared.
    """
    (here, first_s), (there, second_s) = first, second
    if here == there:
        return second_s - first_s
    offsets = evidence.offsets_among({here, there})
    if offsets is None:
        return math.inf
    bound_s = offsets.bound_s(here, first_s) + offsets.bound_s(there, second_s)
    later_s = offsets.to_reference_s(there, second_s) - offsets.to_reference_s(here, first_s) - bound_s
    return later_s if math.isfinite(later_s) else math.inf
