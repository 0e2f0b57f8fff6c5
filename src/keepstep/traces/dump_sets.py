"""Which flight-recorder dumps are of one job and one run, and how their groups are told apart."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from keepstep.core.errors import TraceError
from keepstep.core.events import Op
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import GroupInfo
from keepstep.traces.recorded_content import Content

DEFAULT_GROUP = "default_pg"
_APART_NS = 3_600_000_000_000  # between calls of one run and another: no hang is kept up for so long without a timeout
_FAR = 1024  # ranks between a file's rank and the one before: then its number is no rank


@dataclass(frozen=True, slots=True)
class DumpedCall:
    """One call of a rank, as its dump has it."""

    group: str
    op: Op
    peer: int  # global rank of the other end of a message; -1 for collectives
    seq: int
    created_ns: int
    done: bool
    content: Content
    begun: bool | None = None  # whether its device was seen to have begun it; None: torch did not look


@dataclass(frozen=True, slots=True)
class Dump:
    """What one rank's dump says."""

    groups: Mapping[str, GroupInfo]
    counts: Mapping[str, tuple[int, int]]  # by group: the last operation enqueued, the last completed
    entries: Sequence[DumpedCall]
    is_whole: bool = False  # whether it still has the first call of the process
    # Whether it tells which calls have ended: what hooks record of a backend ("nccl2") is called done when enqueued.
    tells_ends: bool = True
    moved_ns: int = (
        0  # when torch's watchdog last saw the device end a call, in ns on the clock on the wall; 0: never
    )


def strangers(dumps: Mapping[int, Dump]) -> dict[int, str]:
    """Ranks whose dumps do not belong to the job of the others, and why."""
    lists: dict[str, Counter[tuple[int, ...]]] = {}
    for dump in dumps.values():
        for name, info in dump.groups.items():
            if info.members:
                lists.setdefault(name, Counter())[info.members] += 1
    usual = {name: set(counts.most_common(1)[0][0]) for name, counts in lists.items()}
    found: dict[int, str] = {}
    for rank, dump in dumps.items():
        known = [info for info in dump.groups.values() if info.members]
        # Groups that share no rank may have one name: all parts of one split have.
        other = next(
            (
                info
                for info in known
                if set(info.members) != usual[info.name]
                and (
                    info.desc == DEFAULT_GROUP
                    or rank not in info.members
                    or usual[info.name] & {*info.members}
                )
            ),
            None,
        )
        if other is not None:
            found[rank] = f"is of another job: its group {other.name} has ranks {fold_ranks(other.members)}"
        elif known and not any(rank in info.members for info in known):
            everybody = {member for info in known for member in info.members}
            found[rank] = f"is of no rank {rank}: its groups have ranks {fold_ranks(everybody)}; rename it"
    return found if len(found) < len(dumps) else {}


def told_apart(dumps: Mapping[int, Dump]) -> dict[int, Dump]:
    """The dumps, with their members in the names of groups that have the name of others, as parts of one split."""
    lists: dict[str, set[tuple[int, ...]]] = {}
    for dump in dumps.values():
        for name, info in dump.groups.items():
            if info.members:
                lists.setdefault(name, set()).add(info.members)
    found: dict[int, Dump] = {}
    for rank, dump in dumps.items():
        names = {
            name: f"{name} of ranks {fold_ranks(info.members)}" if len(lists.get(name, ())) > 1 else name
            for name, info in dump.groups.items()
        }
        found[rank] = dump
        if any(name != own for name, own in names.items()):
            found[rank] = replace(
                dump,
                groups={names[name]: replace(info, name=names[name]) for name, info in dump.groups.items()},
                counts={names[name]: pair for name, pair in dump.counts.items()},
                entries=[replace(entry, group=names[entry.group]) for entry in dump.entries],
            )
    return found


def earlier_or_later(dumps: Mapping[int, Dump]) -> dict[int, str]:
    """Ranks whose calls were all made long before or after those of most ranks, and how that is told.

    Raises:
        TraceError: the ranks are of several runs, and none of these has the most.
    """
    times = sorted(
        (dump.entries[0].created_ns, dump.entries[-1].created_ns, rank)
        for rank, dump in dumps.items()
        if dump.entries and dump.entries[0].created_ns
    )
    runs: list[list[int]] = []
    until_ns = 0
    for first_ns, last_ns, rank in times:
        if not runs or first_ns > until_ns + _APART_NS:
            runs.append([])
        runs[-1].append(rank)
        until_ns = max(until_ns, last_ns)
    if len(runs) < 2:
        return {}
    last_ns = {rank: dumps[rank].entries[-1].created_ns for run in runs for rank in run}
    *_, second, first = sorted(runs, key=len)
    if len(second) == len(first):
        told = "; ".join(
            f"ranks {fold_ranks(run)} until {_utc(max(last_ns[r] for r in run))}" for run in runs
        )
        raise TraceError(f"the dumps are of several runs: {told}; keep those of one")
    usual = _utc(max(last_ns[rank] for rank in first))
    return {
        rank: f"is of another run: its last call was made at {_utc(last_ns[rank])}, that of the others at {usual}"
        for run in runs
        if run is not first
        for rank in run
        if not _keeps_up(dumps[rank], [dumps[one] for one in first])
    }


def _keeps_up(dump: Dump, others: Sequence[Dump]) -> bool:
    """Whether a rank that made no call for long is where others are in all its groups: it had nothing to do there."""
    return all(any(one.counts.get(group) == its for one in others) for group, its in dump.counts.items())


def _utc(time_ns: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(time_ns // 10**9))
    except (OverflowError, ValueError, OSError):
        return f"{time_ns} ns"


def far_away(dumps: Mapping[int, Dump]) -> dict[int, str]:
    """Ranks that no group lists and that are far from all others, as a date in a file's name is."""
    listed = {rank for dump in dumps.values() for info in dump.groups.values() for rank in info.members}
    ranks = sorted(rank for rank in dumps if rank not in listed)
    found: dict[int, str] = {}
    for before, rank in zip([max(listed, default=-1), *ranks], ranks, strict=False):
        if found or (before >= 0 and rank > 2 * before + _FAR):
            found[rank] = "has a number far from the other ranks in its name; rename it to dump_RANK"
    return found
