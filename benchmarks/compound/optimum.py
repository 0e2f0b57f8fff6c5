"""The best that anybody could do who knows the compound run's schedule, and what each remedy costs.

Shares of micro-batches change at once and for nothing; one pause lets all nodes play any places. An iteration's time
without jitter is what the simulation says of it, so that the plan is exact for the simulated job, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from benchmarks.compound import schedule as given
from benchmarks.compound.job import COUNT, NODES, Cluster

_MOST_SHARE = 2 * given.MICRO_BATCHES


@dataclass(frozen=True, slots=True)
class Plan:
    """``shares`` from each edge of the schedule on; ``pause_at``: the edge at which nodes move, None: they never do."""

    edges: tuple[int, ...]
    shares: tuple[tuple[int, ...], ...]
    pause_at: int | None
    place_of: tuple[int, ...]  # from then on
    bound_s: float  # seconds an iteration that no plan comes below, without jitter
    plan_s: float  # of this plan, without jitter


def best(schedule: given.Schedule, exchange_s: float) -> Plan:
    """The plan, exact but for what ``bound_s`` leaves open.

    With no pause the places are those at the start. After a pause no placement does better in any stretch than
    `_ideal` does if it is the best in each of them, which ``bound_s`` checks by letting slow nodes share a replica and
    links carry nothing wherever that helps: one pause then is enough, at the edge where it pays most.
    """
    edges = schedule.edges
    spans = list(pairwise(edges))
    start, ideal = tuple(range(NODES)), _ideal(schedule)
    here = [_fit(schedule.at(first), start) for first, _ in spans]
    there = [_fit(schedule.at(first), ideal) for first, _ in spans]
    least = [
        min(one[0], other[0], _floor_s(schedule.at(first)))
        for one, other, (first, _) in zip(here, there, spans, strict=True)
    ]
    lengths = [last - first for first, last in spans]

    def total(times: Sequence[tuple[float, tuple[int, ...]]], begin: int, end: int) -> float:
        return sum(times[place][0] * lengths[place] for place in range(begin, end))

    count = len(spans)
    options = [(total(here, 0, count), None)]
    options += [(total(here, 0, at) + exchange_s + total(there, at, count), at) for at in range(count)]
    plan_s, at = min(options, key=lambda one: one[0])
    floor_s = min(
        [total(here, 0, count)]
        + [
            total(here, 0, at) + exchange_s + sum(least[place] * lengths[place] for place in range(at, count))
            for at in range(count)
        ]
    )
    chosen = here if at is None else here[:at] + there[at:]
    return Plan(
        tuple(edges[:-1]), tuple(shares for _, shares in chosen), None if at is None else edges[at], ideal,
        floor_s / schedule.iterations, plan_s / schedule.iterations,
    )  # fmt: skip


def follow(schedule: given.Schedule, plan: Plan, seed: int, exchange_s: float) -> list[float]:
    """Seconds of each iteration of the simulated job with that plan; a pause counts to the iteration after it."""
    cluster, seconds = Cluster(schedule, seed), list[float]()
    ends = [*plan.edges[1:], schedule.iterations]
    for first, last, shares in zip(plan.edges, ends, plan.shares, strict=True):
        cluster.shares = list(shares)
        if first == plan.pause_at:
            cluster.exchange(plan.place_of)
        these = cluster.iterations_s(first, last)
        if first == plan.pause_at:
            these[0] += exchange_s
        seconds += these
    return seconds


def _fit(events: Sequence[given.Event], place_of: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Seconds of an iteration with the best shares, and these: the least longest time over all that can be divided.

    What a replica takes grows with its share, whatever the others have; so the shares are those that fit into the
    shortest time into which all micro-batches fit.
    """
    times = [_replica_s(_seen(events, place_of, replica)) for replica in range(given.DP)]
    options = sorted({time_s for of_replica in times for time_s in of_replica})
    low, high = 0, len(options) - 1

    def most(limit_s: float) -> list[int]:
        return [sum(time_s <= limit_s for time_s in of_replica) for of_replica in times]

    while low < high:
        middle = (low + high) // 2
        fits = most(options[middle])
        low, high = (low, middle) if sum(fits) >= COUNT and min(fits) >= 1 else (middle + 1, high)
    shares = most(options[low])
    while sum(shares) > COUNT:  # who is latest gives one up
        latest = max(
            (one for one in range(given.DP) if shares[one] > 1), key=lambda one: times[one][shares[one] - 1]
        )
        shares[latest] -= 1
    return options[low], tuple(shares)


def _seen(
    events: Sequence[given.Event], place_of: Sequence[int], replica: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per stage: how many times as long the slowest rank of this replica takes, and the stage's gradients."""
    slow, rings = [1.0] * given.PP, [1.0] * given.PP
    for one in events:
        stage, column = divmod(place_of[one.stage * given.DP + one.replica], given.DP)
        if one.kind == "compute":
            if column == replica:
                slow[stage] = max(slow[stage], one.times)
        else:
            other_stage, other = divmod(place_of[one.to_stage * given.DP + one.to_replica], given.DP)
            if stage == other_stage and (column - other) % given.DP in (1, given.DP - 1):
                rings[stage] = max(rings[stage], one.times)
    return tuple(slow), tuple(rings)


@lru_cache(maxsize=256)
def _replica_s(seen: tuple[tuple[float, ...], tuple[float, ...]]) -> tuple[float, ...]:
    """What an iteration takes if only this replica is as slow, by its share from 1 on; others have almost nothing."""
    slow, rings = seen
    events = [
        given.Event(0, "compute", "weak", times, 0, 0, 0, stage, None)
        for stage, times in enumerate(slow)
        if times > 1
    ]
    events += [
        given.Event(0, "link", "weak", times, 0, 0, 1, stage, None, 2, stage)
        for stage, times in enumerate(rings)
        if times > 1
    ]
    faults = given.faults(events, range(NODES))
    found: list[float] = []
    for share in range(1, _MOST_SHARE + 1):
        shares = [share] + [1] * (given.DP - 1)
        found.append(float(given.workload(0, 0.0).iteration_s(1, faults, 0, shares)[0]))
    return tuple(found)


def _floor_s(events: Sequence[given.Event]) -> float:
    """No link carries anything, and slow nodes are in as few replicas as can be, the worst together."""
    slow = sorted((one.times for one in events if one.kind == "compute"), reverse=True)
    pairs = [tuple(slow[at : at + given.PP]) for at in range(0, len(slow), given.PP)]
    together = [
        given.Event(at, "compute", "weak", times, 0, 0, at, stage, None)
        for at, pair in enumerate(pairs)
        for stage, times in enumerate(pair)
    ]
    return _fit(together, range(NODES))[0]


def _ideal(schedule: given.Schedule) -> tuple[int, ...]:
    """A placement in which nodes that are slow at once share replicas, and slow links carry nothing."""
    place_of = list(range(NODES))

    def swap(node: int, place: int) -> None:
        other = place_of.index(place)
        place_of[node], place_of[other] = place, place_of[node]

    def node(one: given.Event) -> int:
        return one.stage * given.DP + one.replica

    compute = [one for one in schedule.events if one.kind == "compute"]
    settled: set[int] = set()
    pairs = [
        (min(one.last, other.last) - max(one.first, other.first), one, other)
        for at, one in enumerate(compute)
        for other in compute[at + 1 :]
    ]
    for overlap, one, other in sorted(pairs, key=lambda pair: -pair[0]):
        if overlap <= 0 or {node(one), node(other)} & settled:
            continue
        settled |= {node(one), node(other)}
        stage, column = divmod(place_of[node(one)], given.DP)
        swap(node(other), (given.PP - 1 - stage) * given.DP + column)
    for link in (one for one in schedule.events if one.kind == "link"):
        here, there = node(link), link.to_stage * given.DP + link.to_replica
        if max(_seen([link], place_of, 0)[1]) > 1:
            free = [place for place in range(NODES) if place_of.index(place) not in settled | {here, there}]
            mover = here if here not in settled else there
            settled |= {here, there}
            stays = place_of[there if mover == here else here]
            far = [p for p in free if p // given.DP != stays // given.DP and p % given.DP != stays % given.DP]
            swap(mover, far[0])
    return tuple(place_of)
