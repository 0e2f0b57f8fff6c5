"""Who holds the others up, by how many collectives each rank has launched in NCCL's communicators.

A collective that one member has not launched cannot end for those that have: they wait in the first such one. Neither
messages nor what has ended is told, so nobody is blamed more surely than with medium confidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from keepstep.core.events import MESSAGES, Op
from keepstep.core.evidence import Evidence
from keepstep.core.incident import Diagnosis
from keepstep.core.launched import Launched, differing
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import GroupInfo, OpInFlight, RankState, StreamProgress
from keepstep.locate._device_calls import device_groups
from keepstep.locate.hang import locate_hang

KINDS: Mapping[str, Op] = {
    "allreduce": Op.ALLREDUCE, "broadcast": Op.BROADCAST, "reduce": Op.REDUCE, "allgather": Op.ALLGATHER,
    "reducescatter": Op.REDUCE_SCATTER, "alltoall": Op.ALLTOALL, "gather": Op.GATHER, "scatter": Op.SCATTER,
}  # fmt: skip
UNTOLD = Op.BARRIER
"""Stands for an operation of unknown kind: NCCL has no barrier, so it counts none."""
_MOST_LINES = 3  # lines of evidence on communicators whose counts differ
_MOST_LISTED = 4  # different counts that such a line lists


def first_open(counts: Mapping[int, Mapping[str, int]]) -> tuple[int, dict[int, Op]]:
    """The first collective that not all ranks have launched: its number, and what each rank has launched there.

    The number counts the kinds in which ranks differ. A rank that is behind is left out.

    Args:
        counts: by rank and kind, from `keepstep.core.launched.differing`.
    """
    kinds = sorted({kind for told in counts.values() for kind in told})
    least = {kind: min(told[kind] for told in counts.values()) for kind in kinds}
    seq = sum(least.values()) + 1
    more = {number: {k for k in kinds if told[k] > least[k]} for number, told in counts.items()}
    ahead = {number: some for number, some in more.items() if some}
    # What all ranks that are ahead have launched more of comes next; if there is no such kind, they differ in it.
    common = set[str].intersection(*ahead.values()) if ahead else set[str]()
    have = Counter(kind for some in ahead.values() for kind in some)
    calls: dict[int, Op] = {}
    for number, some in ahead.items():
        kind = min(sorted(common or some), key=lambda word: (have[word], word))
        is_sure = len(common) == 1 or not common
        calls[number] = KINDS.get(kind.lower(), UNTOLD) if is_sure else UNTOLD
    return seq, calls


def told_counts(communicator: str, counts: Mapping[int, Mapping[str, int]]) -> str:
    """``communicator 0x1b has launched: AllReduce 88 of rank 1, 131 of rank 0``."""
    parts: list[str] = []
    for kind in sorted({kind for told in counts.values() for kind in told}):
        ranks: dict[int, list[int]] = {}
        for number, told in counts.items():
            ranks.setdefault(told[kind], []).append(number)
        listed = [
            f"{count} of rank{'s' * (len(those) > 1)} {fold_ranks(those)}"
            for count, those in sorted(ranks.items())
        ]
        more = f" and {len(listed) - _MOST_LISTED} more" if len(listed) > _MOST_LISTED else ""
        parts.append(f"{kind} {', '.join(listed[:_MOST_LISTED])}{more}")
    return f"communicator {communicator} has launched: {'; '.join(parts)}"


def worded(found: Diagnosis) -> Diagnosis:
    """The diagnosis with a word for operations of unknown kind."""

    def words(text: str) -> str:
        # Where no counts are told, each rank counts as having launched one.
        return text.replace(f"{UNTOLD.name} seq 1", "a collective").replace(UNTOLD.name, "collective")

    culprits = tuple(replace(one, detail=words(one.detail)) for one in found.culprits)
    evidence, missing = tuple(map(words, found.evidence)), tuple(map(words, found.missing))
    return replace(found, culprits=culprits, evidence=evidence, missing=missing, summary=words(found.summary))


def wants_launched(evidence: Evidence) -> bool:
    """Whether there are groups of a device of which torch's flight recorder tells nothing.

    RAS tells less than the recorder does: neither what has ended or begun, nor messages. And it is not to be asked
    while a rank makes a communicator: some releases of NCCL crash then.
    """
    device = device_groups(evidence.states, evidence.groups)
    settled = all(one.communicators_settled for one in evidence.states if one.alive)
    return bool(device.names) and not device.told and settled


def locate_by_launched(evidence: Evidence) -> Diagnosis | None:
    """Who holds the others up on NCCL; None where counts do not tell, or torch's flight recorder tells more.

    A communicator counts only if all of its ranks have told what they have launched.
    """
    if not wants_launched(evidence):
        return None
    names = frozenset(name for name, group in evidence.groups.items() if not group.records_waits)
    found: dict[str, dict[int, Launched]] = {}
    for state in evidence.states:
        for one in state.launched if state.alive else ():
            found.setdefault(one.communicator, {})[state.rank] = one
    counts = {
        name: differ
        for name, of in found.items()
        if all(one.size == len(of) for one in of.values())
        and len(differ := differing({rank: one.counts for rank, one in of.items()})) == len(of)
        and any(differ.values())
    }
    if not counts:
        return None
    calls = {name: first_open(differ) for name, differ in counts.items()}
    states = [_with_launched(state, names, calls, counts) for state in evidence.states]
    groups = {name: GroupInfo(name, tuple(sorted(differ))) for name, differ in counts.items()}
    diagnosis = worded(locate_hang(replace(evidence, states=states, groups={**evidence.groups, **groups})))
    if not diagnosis.culprits:
        return None
    culprits = tuple(
        replace(one, confidence="medium") if one.confidence == "high" else one for one in diagnosis.culprits
    )
    lines = [told_counts(name, differ) for name, differ in counts.items()][:_MOST_LINES]
    return replace(diagnosis, culprits=culprits, evidence=(*diagnosis.evidence, *lines))


def _with_launched(
    state: RankState,
    names: frozenset[str],
    calls: Mapping[str, tuple[int, Mapping[int, Op]]],
    counts: Mapping[str, Mapping[int, object]],
) -> RankState:
    """The state of a rank with the collectives it waits in by the counts; messages are as the ranks count them."""
    in_flight = [one for one in state.in_flight if one.group not in names or one.op in MESSAGES]
    streams: list[StreamProgress] = [
        one for one in state.streams if one.group not in names or one.op in MESSAGES
    ]
    for name, (seq, entered) in calls.items():
        if state.rank not in counts[name]:
            continue
        op = entered.get(state.rank)
        flight, stream = waiting_in(name, seq, op, state.last_progress_s)
        in_flight += flight
        streams.append(stream)
    return replace(state, in_flight=tuple(in_flight), streams=tuple(streams), device=None)


def waiting_in(
    name: str, seq: int, op: Op | None, since_s: float
) -> tuple[Sequence[OpInFlight], StreamProgress]:
    """What a rank is in, and how far, in the first collective of a communicator that not all have launched.

    ``op``: what it has launched there; None: nothing.
    """
    stream = StreamProgress(name, int(op or UNTOLD), -1, seq if op is not None else seq - 1, seq - 1)
    return ([OpInFlight(name, int(op), -1, seq, since_s)] if op is not None else []), stream
