"""What records, profiler output, looks at a GPU's memory and the words of a job say; needs no GPU."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from benchmarks._intervals import interval

OF_NCCL = ("Memcpy DtoD", "oneRankReduce", "ncclDevKernel", "ncclKernel")
COLLECTIVE, FAILED, ENQUEUED, TIMED = 1, 4, 16, 64  # keepstep.core.events: Kind and Flag


class Call(NamedTuple):
    """A record of the shim's; times in nanoseconds, 0: none."""

    group: str
    seq: int
    stream: str
    ticket: int
    start_ns: int
    wait_ns: int
    end_ns: int
    nbytes: int
    kind: int
    flags: int


def collectives(rows: Iterable[Sequence[Any]]) -> list[Call]:
    """The shim's among a job's records, in the order of the calls; the probe's describe the same operations again."""
    calls = (Call(*row) for row in rows)
    found = (call for call in calls if call.kind == COLLECTIVE and call.flags & ENQUEUED)
    return sorted(found, key=lambda call: call.ticket)


def incomplete(calls: Sequence[Call], made: int) -> dict[str, int]:
    """What is wrong with the records of ``made`` calls; empty: each has one, ended well, numbered without a gap."""
    gaps = 0
    by_group: dict[str, list[int]] = defaultdict(list)
    for call in calls:
        by_group[call.group].append(call.seq)
    for numbers in by_group.values():
        gaps += sum(b - a != 1 for a, b in zip(sorted(numbers), sorted(numbers)[1:], strict=False))
    found = {
        "missing": made - len(calls),
        "gaps": gaps,
        "without end": sum(call.end_ns == 0 for call in calls),
        "failed": sum(bool(call.flags & FAILED) for call in calls),
    }
    return {what: count for what, count in found.items() if count}


def goings_back(calls: Sequence[Call]) -> list[int]:
    """By how many nanoseconds the GPU's times of a stream go back; empty: they are ordered as the calls are."""
    found: list[int] = []
    latest: dict[str, int] = {}
    for call in calls:
        if not call.flags & TIMED or call.end_ns == 0:
            continue
        for now_ns in (call.wait_ns, call.end_ns):
            before_ns = latest.get(call.stream, 0)
            if now_ns < before_ns:
                found.append(before_ns - now_ns)
            latest[call.stream] = max(now_ns, before_ns)
    return found


def beside(
    calls: Sequence[Call], seen: Iterable[Sequence[Any]], made: int
) -> list[tuple[float, float, float]]:
    """For each timed call: the shim's duration, the profiler's, and by how much its start is after ours; ns.

    ``seen`` is (name, start, duration); its last ``made`` of NCCL count. Raises ValueError where the two do not agree.
    """
    timed = [call for call in calls if call.flags & TIMED and call.end_ns]
    named = [event for event in seen if any(name in event[0] for name in OF_NCCL)]
    events = sorted(named, key=lambda event: event[1])[-made:]
    if len(timed) != made or len(events) != made:
        names = dict(Counter(event[0].partition("<")[0] for event in seen))
        raise ValueError(f"{made} calls: {len(timed)} timed, {len(events)} of the profiler's, in all {names}")
    return [
        (float(call.end_ns - call.wait_ns), float(event[2]), event[1] - call.wait_ns)
        for call, event in zip(timed, events, strict=True)
    ]


def measuring_adds(times: Sequence[float], measured: Sequence[bool]) -> list[float]:
    """By how much a block of measured steps is longer than those beside it, as a part of them: one for each block.

    ``times`` are seconds of steps in their order. A block without others on both sides is left out, and so is the step
    at each of its ends, where a mark may be in either.
    """
    blocks = [list(block) for _, block in groupby(range(len(times)), key=lambda at: measured[at])]
    found: list[float] = []
    for before, block, after in zip(blocks, blocks[1:], blocks[2:], strict=False):
        inner = block[1:-1]
        if not measured[block[0]] or not inner:
            continue
        beside = [*before[1:-1][-len(inner) :], *after[1:-1][: len(inner)]]
        if beside:
            usual = statistics.fmean(times[at] for at in beside)
            found.append(statistics.fmean(times[at] for at in inner) / usual - 1)
    return found


def added(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """What the first of each pair takes more than the second: the mean and its 95 % interval. Two pairs or more."""
    return interval([one - other for one, other in pairs])


def synchronisations(events: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Of a profiler's trace, how often the training's streams were made to wait, and the host waited for them.

    The training's streams are those with kernels: a snapshot has none. Of a wait for an event whose stream the trace
    does not tell, nobody knows whether it is the training's.
    """
    events = list(events)
    training = {event["args"].get("stream") for event in events if event.get("cat") == "kernel"}
    found = Counter[str]()
    for event in events:
        if event.get("cat") != "cuda_sync":
            continue
        told = event["args"]
        kind, stream, awaited = (told.get(name) for name in ("cuda_sync_kind", "stream", "wait_on_stream"))
        if kind == "Stream Wait Event":
            found["put"] += stream in training
        elif kind == "Event Sync":
            found["host"] += awaited in training
            found["unknown"] += awaited in (None, -1)
        else:  # for a stream, or for all of them
            found["host"] += kind == "Context Sync" or stream in training
    return {
        "waits put on the training's streams": found["put"],
        "the host's waits for them": found["host"],
        "the host's waits for events of unknown streams": found["unknown"],
    }


class Look(NamedTuple):
    """What the driver said of a GPU: Unix seconds, its free bytes, and who has memory there."""

    at_s: float
    free: int
    pids: frozenset[int]


def freed(looks: Sequence[Look], pid: int, killed_s: float, held: int) -> dict[str, float]:
    """Seconds from its death until the driver lists a process no more, and until nine tenths of what it held are free.

    What was not seen is left out: a driver in a container may list nobody.
    """
    before = [look for look in looks if look.at_s <= killed_s]
    after = [look for look in looks if look.at_s > killed_s]
    found: dict[str, float] = {}
    if before and pid in before[-1].pids:
        gone = [look.at_s for look in after if pid not in look.pids]
        found |= {"not listed (s)": gone[0] - killed_s} if gone else {}
    if before:
        free = [look.at_s for look in after if look.free >= before[-1].free + 0.9 * held]
        found |= {"memory free (s)": free[0] - killed_s} if free else {}
    return found


def until_next_step(struck_s: float, trained: Sequence[Mapping[int, float]]) -> float | None:
    """Seconds from a failure until all ranks have made a step of a later incarnation; None: they have not.

    ``trained``: of each rank, by incarnation, when it had made its first step; Unix seconds.
    """
    known = set[int].intersection(*(set(one) for one in trained))
    times = [[one[incarnation] for one in trained] for incarnation in sorted(known)]
    return next((max(each) - struck_s for each in times if min(each) > struck_s), None)


class Told(NamedTuple):
    """A step that a rank has made, of those with which an incarnation begins."""

    incarnation: int
    pid: int
    at_s: float
    """Unix seconds."""
    step: int


def until_new_step(
    struck_s: float, told: Sequence[Sequence[Told]], noted: Sequence[tuple[float, int]]
) -> float | None:
    """Seconds from a failure until each rank has made a step that no rank had before; None: they have not.

    The newest incarnation counts that all ranks have begun since. ``told``: of each rank. ``noted``: when a step was
    seen to be made, by any rank; of those that were made before the incarnation only what was noted then is known.
    """
    since = [[one for one in steps if one.at_s > struck_s] for steps in told]
    common = set[int].intersection(*({one.incarnation for one in steps} for steps in since))
    if not common:
        return None
    newest = [[one for one in steps if one.incarnation == max(common)] for steps in since]
    began_s = min(steps[0].at_s for steps in newest)
    before = max((step for at_s, step in noted if at_s < began_s), default=-1)
    times = [next((one.at_s for one in steps if one.step > before), None) for steps in newest]
    known = [at_s for at_s in times if at_s is not None]
    return max(known) - struck_s if len(known) == len(times) else None


def last_words(console: str) -> str:
    """The last line that names an error, else the last."""
    lines = [line.strip() for line in console.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line or "Duplicate GPU" in line]
    return (errors or lines or ["it said nothing"])[-1][:400]
