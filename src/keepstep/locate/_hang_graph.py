"""What is known about a hang, for the functions that diagnose one, and the words for what they conclude."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from keepstep.core.events import Op, phase_place, phase_title
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Confidence, Culprit, Diagnosis, IncidentKind
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import STOPPED, OpInFlight, RankState
from keepstep.locate._device_calls import DeviceGroups, device_groups
from keepstep.locate._paths import Pair, Paths, pairs_among
from keepstep.locate._waiting import Pending, pending_operations

MAX_CULPRITS = 64  # ranks that are named in one diagnosis
FEW = 4  # suspects; more than this are unlikely all at fault
UNKNOWN_PROCESS = "?"  # process state of a rank that is known only from a trace
_LONGEST_CHAIN = 256  # pipeline stages that are followed at most


@dataclass(frozen=True, slots=True)
class HangEvidence:
    """The evidence about a hang, arranged for the questions that the diagnosing functions ask."""

    given: Evidence
    states: Mapping[int, RankState]  # state by rank, of the ranks that reported
    pending: Sequence[Pending]  # operations that some rank is still in
    paths: Paths  # network paths between nodes, as far as probed or seen in traffic
    device: DeviceGroups  # what is known of groups of a device, where ends are not recorded

    @property
    def nodes(self) -> Mapping[int, str]:
        """Node name by rank, of all ranks of the job."""
        return self.given.nodes

    @property
    def silent(self) -> list[int]:
        """Ranks that have not reported, ascending."""
        return sorted(set(self.nodes) - set(self.states))

    def pairs(self, operation: Pending) -> list[Pair]:
        """The pairs of nodes between which the operation sends data, as far as that is known."""
        nodes = [self.nodes[rank] for rank in sorted(operation.members) if self.nodes.get(rank)]
        around = {self.nodes.get(rank, "") for rank in operation.waiting} if operation.through else ()
        return pairs_among(nodes, around)

    def parts_of(self, p: Pending) -> list[OpInFlight]:
        """The parts that ranks have in an operation, one a rank that is in it."""
        return [one for rank in p.waiting for one in self.states[rank].in_flight if is_of(one, p)]

    def waits_in(self, rank: int, p: Pending) -> bool:
        """Whether the rank has been seen to wait for the operation to end, not only to have it in flight."""
        return any(flight.waits and is_of(flight, p) for flight in self.states[rank].in_flight)

    def diagnosis(
        self,
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
        victims = tuple(sorted({rank for p in self.pending for rank in p.waiting} - blamed))
        lines = [f"{len(self.states)}/{max(len(self.nodes), len(self.states))} ranks reporting"]
        if main is not None and blamed:
            direct = self._direct(blamed)
            lines.append(
                f"{direct} ranks wait for them directly, {max(len(victims) - direct, 0)} through others"
            )
        silent = self.silent
        if silent and not missing:
            missing = (f"states of ranks {fold_ranks(silent)}",)
        summary = str(main) if main is not None else ""
        if main is not None and any(one.process_state != UNKNOWN_PROCESS for one in self.states.values()):
            summary += f" stuck {main.stuck_s:.0f} s"
        return Diagnosis(kind, culprits, victims, (*lines, *evidence), missing, summary)

    def culprit(self, rank: int, p: Pending | None, confidence: Confidence, cause: str = "") -> Culprit:
        """The rank as a culprit. ``p``: the operation it holds up. ``cause``: default from its process state."""
        state = self.states[rank]
        place = phase_place(state.phase)
        detail: list[str] = []
        left = [one for one in self.pending if rank in one.waiting and one.collective and one.through > 0]
        overtaken = left[0] if left else None
        # A live process may have finished an asynchronous operation unseen, unless it was seen to wait for it.
        if overtaken and (state.process_state == UNKNOWN_PROCESS or self.waits_in(rank, overtaken)):
            cause = cause or "did not finish"
            detail.append(f"has not finished {overtaken}, which {overtaken.through} members are through")
        named = cause or _cause(state, place)
        if p is not None and rank in p.absent:
            detail.append(str(p) if named == "never entered" else f"never entered {p}")
        if state.alive and not cause and place:
            batch = f" of micro-batch {state.microbatch}" if state.microbatch >= 0 else ""
            detail.append(f"{place}{batch} for {max(state.now_s - state.phase_since_s, 0):.0f} s")
        if (number := self._pipeline_stage(rank)) is not None:
            detail.append(f"pipeline stage {number}")
        if frame := _innermost_frame(state.stack):
            detail.append(f"at {frame}")
        node = self.nodes.get(rank, "")
        stage = phase_title(state.phase)
        return Culprit(rank, None, node, stage, 0.0, confidence, named, "; ".join(detail))

    def last_progress_s(self, ranks: Sequence[int]) -> dict[int, float]:
        """When each rank last made progress: on a common clock if there is one, else relative to its own present."""
        states = [self.states[rank] for rank in ranks]
        offsets = self.given.offsets_among({self.nodes.get(rank, "") for rank in ranks})
        if offsets is None:
            return {state.rank: state.last_progress_s - state.now_s for state in states}
        return {
            state.rank: offsets.to_reference_s(self.nodes.get(state.rank, ""), state.last_progress_s)
            for state in states
        }

    def progress_lines(self, order: Sequence[int]) -> tuple[str, ...]:
        """For each of the first three ranks a line on when it last made progress."""
        lines: list[str] = []
        for rank in order[:3]:
            state = self.states[rank]
            if state.process_state == UNKNOWN_PROCESS:
                continue  # a trace says when operations were enqueued, not when the trace was written
            ago = max(state.now_s - state.last_progress_s, 0.0)
            place, process = phase_place(state.phase), state.process_state
            told = [f"last progress {ago:.1f} s ago"]
            told += [place] if place else []
            told.append(f"process state {process}" if process else "process gone")
            lines.append(f"rank {rank}: {', '.join(told)}")
        return tuple(lines)

    def _pipeline_stage(self, rank: int) -> int | None:
        """The rank's place in the chain of ranks that send to each other, numbered from the lowest rank."""
        chain: dict[int, set[int]] = {}
        todo = [rank]
        while todo and len(chain) <= _LONGEST_CHAIN:
            one = todo.pop()
            if one not in chain and one in self.states:
                streams = self.states[one].streams
                sends = {stream.peer for stream in streams if stream.op == Op.SEND}
                if sends != {stream.peer for stream in streams if stream.op == Op.RECV} or len(sends) > 2:
                    return None  # a one-way ring, or no pipeline at all
                chain[one] = sends
                todo += sends
        return sorted(chain).index(rank) if 1 < len(chain) <= _LONGEST_CHAIN else None

    def _direct(self, blamed: set[int]) -> int:
        """How many ranks wait in an operation that a blamed rank itself holds up."""

        def holds_up(p: Pending) -> bool:
            return not blamed.isdisjoint(p.absent + p.unknown + (p.waiting if p.entered_by_all else ()))

        return len({rank for p in self.pending if holds_up(p) for rank in p.waiting} - blamed)


@dataclass(frozen=True, slots=True)
class Roots:
    """The roots of the wait-for graph."""

    ranks: tuple[int, ...]  # ranks that others wait for, and that wait for nobody
    blocked: frozenset[int]  # ranks that wait in some operation
    sure: bool  # whether the roots were found without ignoring any wait


def arranged(evidence: Evidence) -> HangEvidence:
    """The evidence with the operations that the living ranks are in; dead ones will never enter these."""
    device = device_groups(evidence.states, evidence.groups)
    by_rank = {state.rank: state for state in device.states}
    dead = {rank for rank, state in by_rank.items() if not state.alive}
    living = [state for state in device.states if state.alive]
    pending = [
        replace(
            p,
            absent=(*p.absent, *(r for r in p.unknown if r in dead)),
            unknown=tuple(r for r in p.unknown if r not in dead),
        )
        for p in pending_operations(living, evidence.groups, device.mute, device.names)
    ]
    paths = Paths(evidence.probes, evidence.traffic, evidence.addresses)
    return HangEvidence(evidence, by_rank, pending, paths, device)


def is_of(flight: OpInFlight, p: Pending) -> bool:
    """Whether this operation in flight is the rank's part of ``p``."""
    return flight.group == p.group and flight.seq == p.seq and (flight.peer < 0) == p.collective


def _innermost_frame(stack: str) -> str:
    """The innermost frame of the main thread, or of the first where that is not told; "" without a stack."""
    _, _, main = stack.partition('"MainThread"')
    lines = (main or stack).splitlines()
    # py-spy and faulthandler print the innermost frame first; above are lines on the process and the thread.
    return next((line.strip()[:120] for line in lines if line.startswith(" ") and ".py" in line), "")


def _cause(state: RankState, place: str) -> str:
    if not state.alive:
        return "process died"
    if state.process_state in STOPPED:
        return "stopped"
    doing = {"S": "asleep", "D": "stuck in the kernel", "R": "busy"}.get(state.process_state)
    return f"{doing} {place}" if doing else "never entered"
