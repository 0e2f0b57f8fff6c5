"""Puts the diagnosis of a hang and its culprits into words."""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.events import Op, phase_title
from keepstep.core.incident import Confidence, Culprit, Diagnosis, IncidentKind
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import RankState
from keepstep.locate._hang_graph import STOPPED, UNKNOWN_PROCESS, HangEvidence, waits_in
from keepstep.locate._waiting import Pending

_LONGEST_CHAIN = 256  # pipeline stages that are followed at most


def diagnosis_of(
    known: HangEvidence,
    culprits: tuple[Culprit, ...],
    blamed: set[int],
    main: Pending | None,
    evidence: Sequence[str],
    missing: tuple[str, ...] = (),
    kind: IncidentKind = "hang",
) -> Diagnosis:
    """The diagnosis with its victims, and with evidence that applies to every hang.

    ``blamed``: the ranks at fault. ``main``: the operation for the summary. ``missing``: what is not known.
    """
    victims = tuple(sorted({rank for p in known.pending for rank in p.waiting} - blamed))
    lines = [f"{len(known.states)}/{max(len(known.nodes), len(known.states))} ranks reporting"]
    if main is not None and blamed:
        direct = _direct(known, blamed)
        lines.append(f"{direct} ranks wait for them directly, {max(len(victims) - direct, 0)} through others")
    silent = known.silent
    if silent and not missing:
        missing = (f"states of ranks {fold_ranks(silent)}",)
    summary = str(main) if main is not None else ""
    if main is not None and any(state.process_state != UNKNOWN_PROCESS for state in known.states.values()):
        summary += f" stuck {main.stuck_s:.0f} s"
    return Diagnosis(kind, culprits, victims, (*lines, *evidence), missing, summary)


def culprit_of(
    known: HangEvidence, rank: int, p: Pending | None, confidence: Confidence, cause: str = ""
) -> Culprit:
    """The rank as a culprit. ``p``: the operation it holds up. ``cause``: default from its process state."""
    state = known.states[rank]
    phase = phase_title(state.phase)
    detail: list[str] = []
    overtaken = next((o for o in known.pending if rank in o.waiting and o.collective and o.through > 0), None)
    # A live process may have finished an asynchronous operation unseen, unless it was seen to wait for it.
    if overtaken is not None and (state.process_state == UNKNOWN_PROCESS or waits_in(known, rank, overtaken)):
        cause = cause or "did not finish"
        detail.append(f"has not finished {overtaken}, which {overtaken.through} members are through")
    named = cause or _cause(state, phase)
    if p is not None and rank in p.absent:
        detail.append(str(p) if named == "never entered" else f"never entered {p}")
    if state.alive and not cause and phase:
        batch = f" of micro-batch {state.microbatch}" if state.microbatch >= 0 else ""
        detail.append(f"in {phase}{batch} for {max(state.now_s - state.phase_since_s, 0):.0f} s")
    stage = _pipeline_stage(known, rank)
    if stage is not None:
        detail.append(f"pipeline stage {stage}")
    frame = _innermost_frame(state.stack)
    if frame:
        detail.append(f"at {frame}")
    node = known.nodes.get(rank, "")
    return Culprit(rank, None, node, phase, 0.0, confidence, named, "; ".join(detail))


def _pipeline_stage(known: HangEvidence, rank: int) -> int | None:
    """The rank's place in the chain of ranks that send to each other, numbered from the lowest rank."""
    chain: dict[int, set[int]] = {}
    todo = [rank]
    while todo and len(chain) <= _LONGEST_CHAIN:
        one = todo.pop()
        if one not in chain and one in known.states:
            streams = known.states[one].streams
            sends = {stream.peer for stream in streams if stream.op == Op.SEND}
            if sends != {stream.peer for stream in streams if stream.op == Op.RECV} or len(sends) > 2:
                return None  # a one-way ring, or no pipeline at all
            chain[one] = sends
            todo += sends
    return sorted(chain).index(rank) if 1 < len(chain) <= _LONGEST_CHAIN else None


def _cause(state: RankState, phase: str) -> str:
    if not state.alive:
        return "process died"
    if state.process_state in STOPPED:
        return "stopped"
    doing = {"S": "asleep", "D": "stuck in the kernel", "R": "busy"}.get(state.process_state)
    return f"{doing} in {phase}" if doing else "never entered"


def _innermost_frame(stack: str) -> str:
    """The first line that names a Python file: py-spy and faulthandler print the innermost frame first."""
    return next((line.strip()[:120] for line in stack.splitlines() if ".py" in line), "")


def _direct(known: HangEvidence, blamed: set[int]) -> int:
    """How many ranks wait in an operation that a blamed rank itself holds up."""

    def holds_up(p: Pending) -> bool:
        return not blamed.isdisjoint(p.absent + p.unknown + (p.waiting if p.entered_by_all else ()))

    return len({rank for p in known.pending if holds_up(p) for rank in p.waiting} - blamed)


def last_progress_s(known: HangEvidence, ranks: Sequence[int]) -> dict[int, float]:
    """When each rank last made progress: on a common clock where clocks are known, else relative to its own present."""
    states = [known.states[rank] for rank in ranks]
    offsets = known.given.offsets_among({known.nodes.get(rank, "") for rank in ranks})
    if offsets is None:
        return {state.rank: state.last_progress_s - state.now_s for state in states}
    return {
        state.rank: offsets.to_reference_s(known.nodes.get(state.rank, ""), state.last_progress_s)
        for state in states
    }


def progress_lines(known: HangEvidence, order: Sequence[int]) -> tuple[str, ...]:
    """For each of the first three ranks a line on when it last made progress."""
    lines: list[str] = []
    for rank in order[:3]:
        state = known.states[rank]
        if state.process_state == UNKNOWN_PROCESS:
            continue  # a trace says when operations were enqueued, not when the trace was written
        ago = max(state.now_s - state.last_progress_s, 0.0)
        phase, process = phase_title(state.phase), state.process_state
        told = [f"last progress {ago:.1f} s ago"]
        told += [f"in {phase}"] if phase else []
        told.append(f"process state {process}" if process else "process gone")
        lines.append(f"rank {rank}: {', '.join(told)}")
    return tuple(lines)
