"""Which groups to validate: those slower than comparable ones, and those of ranks that are under suspicion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_low

from keepstep.core.incident import Culprit
from keepstep.core.summary import GroupInfo, IterationSummary

DEGRADED = 1.1  # ratio to the median of comparable groups above which a group is degraded (GREYHOUND §4.3)
_EXPLAINS = 0.2  # least part of the slowdown that a degraded group costs: less is how groups differ anyway
MOST_GROUPS = 8

_Key = tuple[int, int, int]  # operation, bytes of each, number of members


def degraded_groups(
    rows: Iterable[IterationSummary], groups: Mapping[str, GroupInfo], least_s: float = 0.0
) -> tuple[str, ...]:
    """Groups whose transfers take over 1.1 times the median of groups with the same operation, bytes and size.

    Their transfers must also cost at least ``least_s`` more in an iteration. A group's transfer time is what the last
    of its members to arrive sees: the shortest of an operation's durations.
    """
    fastest: dict[_Key, dict[str, float]] = {}
    counts: dict[_Key, int] = {}  # operations per iteration
    for row in rows:
        for stream in row.streams:
            group = groups.get(stream.group)
            if group is None or stream.count <= 0 or stream.fastest_s <= 0:
                continue
            key = stream.op, stream.bytes // stream.count, len(group.members)
            counts[key] = max(counts.get(key, 0), stream.count)
            known = fastest.setdefault(key, {})
            known[stream.group] = min(known.get(stream.group, stream.fastest_s), stream.fastest_s)
    worst: dict[str, float] = {}
    for key, times in fastest.items():
        middle = median_low(times.values())
        for name, time_s in times.items():
            if time_s > DEGRADED * middle and (time_s - middle) * counts[key] >= least_s:
                worst[name] = max(worst.get(name, 0.0), time_s / middle)
    return tuple(sorted(worst, key=lambda name: -worst[name]))


def suspicious_groups(
    rows: Iterable[IterationSummary],
    groups: Mapping[str, GroupInfo],
    culprits: Sequence[Culprit],
    world: Sequence[int],
    slowdown_s: float = 0.0,
) -> tuple[tuple[int, ...], ...]:
    """Members of the groups to validate, at most 8 of them; all ranks as one group when nobody is suspected.

    Groups with a suspected rank come first, then degraded ones. A group of all ranks is left out where smaller ones are
    chosen. ``slowdown_s``: how much longer the job's iteration takes.
    """
    ranks = {one.rank for one in culprits} | {rank for one in culprits if one.link for rank in one.link.ranks}
    members = {name: group.members for name, group in groups.items() if 1 < len(group.members) < len(world)}
    names = [name for name, inside in members.items() if ranks.intersection(inside)]
    names += [name for name in degraded_groups(rows, groups, _EXPLAINS * slowdown_s) if name in members]
    chosen = tuple(dict.fromkeys(members[name] for name in names))[:MOST_GROUPS]
    return chosen or ((tuple(world),) if world else ())
