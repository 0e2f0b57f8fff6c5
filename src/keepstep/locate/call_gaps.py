"""Who is slow, from the times of calls alone, without ends or groups (MegaTrace §III-B records no more).

A host that waits shows it in the gap *after* a call that waits for others (a receive, a small collective whose result
is read). The other gaps are the rank's own time. Ranks of one tensor-parallel group are held up inside each other's
kernels and look alike in that; among them the culprit comes last to the small collectives that all ranks take part in.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from keepstep.core.incident import Culprit, Diagnosis
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import SMALL_BYTES
from keepstep.core.traced_operations import Call

_LEAST_SLOWDOWN = 0.03  # part of a healthy step by which steps must have grown
_LEAST_SHARE = 0.25  # part of the job's growth that the culprit's own time must show
_ALIKE = 0.7  # part of the greatest growth; ranks above it cannot be told apart by own time
_LATE_ALIKE = 0.5  # part of the greatest lateness; ranks above it cannot be told apart by lateness
_LEAST_LATE = 0.02  # part of the job's growth; a smaller lateness shows nothing

_Key = tuple[str, int, int]  # function, bytes, how many such calls came before in the step


@dataclass(frozen=True, slots=True)
class CallStep:
    """One step of one rank: the calls after one boundary call up to and including the next."""

    begin_s: float
    calls: tuple[Call, ...]

    @property
    def duration_s(self) -> float:
        return self.calls[-1].at_s - self.begin_s


def boundaries(periods: Mapping[int, Sequence[Call]]) -> dict[int, tuple[str, int]] | None:
    """For each rank the call (function, bytes) that ends its steps: one that comes once in its period.

    The function is the same on all ranks, the one that carries most; its bytes may differ between pipeline stages. None
    when there is no such function. ``periods``: one period of each rank.
    """
    once: dict[int, dict[str, int]] = {}
    for rank, calls in periods.items():
        counts = Counter((call.function, call.nbytes) for call in calls)
        own = once.setdefault(rank, {})
        for (function, nbytes), count in counts.items():
            if count == 1:
                own[function] = max(own.get(function, -1), nbytes)
    names: list[set[str]] = [set(own) for own in once.values()]
    common: set[str] = names[0].intersection(*names[1:]) if names else set()
    if not common:
        return None
    chosen = max(common, key=lambda function: (min(own[function] for own in once.values()), function))
    return {rank: (chosen, own[chosen]) for rank, own in once.items()}


def split(calls: Sequence[Call], at: tuple[str, int]) -> list[CallStep]:
    """The steps between the boundary calls ``at``."""
    places = [place for place, call in enumerate(calls) if (call.function, call.nbytes) == at]
    return [
        CallStep(calls[first].at_s, tuple(calls[first + 1 : second + 1]))
        for first, second in itertools.pairwise(places)
    ]


def locate_by_gaps(
    healthy: Mapping[int, Sequence[CallStep]], slow: Mapping[int, Sequence[CallStep]]
) -> Diagnosis:
    """Name the ranks whose own time grew. For each rank, steps before and during the slowdown are given.

    Times must be on one clock, or on clocks that differ by less than what the slow rank loses in a step.
    """
    ranks = sorted(rank for rank in healthy if healthy[rank] and slow.get(rank))
    silent = sorted(set(healthy) - set(ranks))
    missing = (f"healthy and slow steps of ranks {fold_ranks(silent)}",) if silent else ()
    if not ranks:
        return Diagnosis("slow", missing=missing)
    job = median(_middle(slow[rank]) - _middle(healthy[rank]) for rank in ranks)
    own = {rank: _own_s(slow[rank]) - _own_s(healthy[rank]) for rank in ranks}
    greatest = max(own.values())
    usual = median(_middle(healthy[rank]) for rank in ranks)
    if job < _LEAST_SLOWDOWN * usual or greatest < _LEAST_SHARE * job:
        told = f"own time of the ranks grew by at most {greatest:.3g} s, steps by {job:.3g} s"
        missing = (*missing, "ends of the operations, to tell slow transfers")
        return Diagnosis("slow", evidence=(told,), missing=missing)
    chosen = [rank for rank in ranks if own[rank] >= _ALIKE * greatest]
    before_s, after_s = _own_s(healthy[chosen[0]]), _own_s(slow[chosen[0]])
    evidence = [f"ranks {fold_ranks(chosen)}: own time {before_s:.3g} -> {after_s:.3g} s a step"]
    alone = len(chosen) == 1
    if not alone:
        late = _lateness(healthy, slow, chosen)
        latest = max(late.values())
        if latest >= _LEAST_LATE * job:
            named = [rank for rank in chosen if late[rank] >= _LATE_ALIKE * latest]
            told = f"last of these to small collectives: {fold_ranks(named)}"
            evidence.append(f"{told}, by {latest:.3g} s more than before")
            chosen, alone = named, len(named) == 1
    culprits = tuple(
        Culprit(
            rank, None, "", "", round(_own_s(slow[rank]) / max(_own_s(healthy[rank]), 1e-9), 2),
            "high" if alone else "medium", "compute", "own time grew while the others waited",
        )
        for rank in sorted(chosen, key=lambda rank: -own[rank])
    )  # fmt: skip
    victims = tuple(rank for rank in ranks if rank not in chosen)
    return Diagnosis("slow", culprits, victims, tuple(evidence), missing)


def _middle(steps: Sequence[CallStep]) -> float:
    return median(step.duration_s for step in steps)


def _own_s(steps: Sequence[CallStep]) -> float:
    """Median over steps of the time that was not spent after a call that waits."""
    totals: list[float] = []
    for step in steps:
        before_s, waits, total = step.begin_s, False, 0.0
        for call in step.calls:
            total += 0.0 if waits else call.at_s - before_s
            small = call.nbytes <= SMALL_BYTES and call.function != "Send"
            before_s, waits = call.at_s, small or call.function == "Recv"
        totals.append(total)
    return median(totals)


def _lateness(
    healthy: Mapping[int, Sequence[CallStep]], slow: Mapping[int, Sequence[CallStep]], ranks: Sequence[int]
) -> dict[int, float]:
    """By how much the lateness of each rank at small collectives, compared with the other ranks, has grown."""
    before, now = _late(healthy, ranks), _late(slow, ranks)
    return {
        rank: max((now[key][rank] - before[key][rank] for key in before.keys() & now.keys()), default=0.0)
        for rank in ranks
    }


def _late(steps: Mapping[int, Sequence[CallStep]], ranks: Sequence[int]) -> dict[_Key, dict[int, float]]:
    """For each small collective of a step, how long after the first rank each rank came; medians over steps."""
    late: dict[_Key, dict[int, list[float]]] = {}
    for together in _together(steps, ranks):
        arrived = {rank: _small(step) for rank, step in together.items()}
        keys = [set(own) for own in arrived.values()]
        for key in keys[0].intersection(*keys[1:]):
            first_s = min(own[key] for own in arrived.values())
            for rank, own in arrived.items():
                late.setdefault(key, {}).setdefault(rank, []).append(own[key] - first_s)
    return {key: {rank: median(times) for rank, times in by_rank.items()} for key, by_rank in late.items()}


def _together(steps: Mapping[int, Sequence[CallStep]], ranks: Sequence[int]) -> Iterator[dict[int, CallStep]]:
    """For each step of the first rank, the steps of all ranks that begin nearest to it."""
    for step in steps[ranks[0]]:
        found = {rank: min(steps[rank], key=lambda one: abs(one.begin_s - step.begin_s)) for rank in ranks}
        if all(abs(one.begin_s - step.begin_s) < 0.5 * step.duration_s for one in found.values()):
            yield found


def _small(step: CallStep) -> dict[_Key, float]:
    """The times of the small collectives of a step."""
    found: dict[_Key, float] = {}
    counts: Counter[tuple[str, int]] = Counter()
    for call in step.calls:
        if call.nbytes <= SMALL_BYTES and call.function not in ("Send", "Recv"):
            symbol = (call.function, call.nbytes)
            found[(*symbol, counts[symbol])] = call.at_s
            counts[symbol] += 1
    return found
