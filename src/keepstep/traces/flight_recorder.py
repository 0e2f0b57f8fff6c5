"""PyTorch flight-recorder dumps (versions 2.x): how far each rank's device is, from what its host has enqueued.

Readable are the pickles that ``TORCH_NCCL_DUMP_ON_TIMEOUT`` and ``torch.distributed`` write, and their JSON form. The
rank is in the file's name.

Dumps of Gloo jobs list the members of the default group only, without its name, and of no group once there are others.
Their counts of enqueued operations include messages without entries. There, the members of a group without a list are
the ranks with entries of it, and counts are taken from the entries. The latter also holds for NCCL's groups with
messages, because torch counts them and collectives apart but writes the number of either as the last.

What torch's hooks have recorded (``c10d.FlightRecorderHook``, for the backend "nccl2") is called done when it is
enqueued, and messages are without their other end. So of such dumps only how many collectives were called is used.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from keepstep.core.errors import TraceError
from keepstep.core.events import MESSAGES, Op
from keepstep.core.habits import usual
from keepstep.core.ranges import fold_ranks
from keepstep.core.regular_files import read_regular
from keepstep.core.summary import DeviceCalls, GroupInfo, OpEnded, OpInFlight, RankState, StreamProgress
from keepstep.traces._coalesced import merged, recorded, settled, without_overtaken
from keepstep.traces._dumped_messages import ends, messages_of, numbered
from keepstep.traces.dump_files import MOST_RANKS, ranks_of, two_of_one_rank
from keepstep.traces.dump_sets import (
    DEFAULT_GROUP,
    Dump,
    DumpedCall,
    earlier_or_later,
    far_away,
    strangers,
    told_apart,
)
from keepstep.traces.plain_data import MOST_BYTES, read_json, read_pickle
from keepstep.traces.recorded_content import content_of

MOST_CALLS = 200_000  # calls read from a dump; torch keeps 2000, unless TORCH_FR_BUFFER_SIZE is set
_MOST_MEMBERS = 2 << 20  # members of all groups of a dump together
_MOST_NUMBER = 1 << 62  # the largest sequence number or time in ns
_ENDED_NS = "time_discovered_completed_ns"
_NEWEST = 64  # calls of a dump that are read at least, where only the newest are
_MOST_LETTERS = 200  # characters of a name that are kept
_MOST_LINES = 20  # on files that could not be used
_NO_PHASE = -1
_ENDED = 64  # calls of a group that are told
_BY_HOOKS = "c10d:"  # how the name of a call begins that c10d.FlightRecorderHook has recorded
_DEVICE = "cuda:nccl2"  # the backend of groups that hooks record
_P2P = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})$")
_RANKS = re.compile(r"[\[(]?((?:\s*\d{1,9}\s*,)*\s*\d{1,9}|)\s*,?\s*[\])]?")
# torch's barrier on NCCL is an all-reduce of one element, and so named in older versions.
_OPS: tuple[tuple[str, Op], ...] = (
    ("barrier", Op.BARRIER), ("reduce_scatter", Op.REDUCE_SCATTER), ("all_gather", Op.ALLGATHER),
    ("allgather", Op.ALLGATHER), ("all_to_all", Op.ALLTOALL), ("alltoall", Op.ALLTOALL), ("all_reduce", Op.ALLREDUCE),
    ("allreduce", Op.ALLREDUCE), ("broadcast", Op.BROADCAST), ("gather", Op.GATHER),
    ("scatter", Op.SCATTER), ("reduce", Op.REDUCE), ("send", Op.SEND), ("recv", Op.RECV),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dumps:
    """The content of the dumps of a job. ``missing`` says what could not be used, and why.

    ``listed``: the number of ranks by the members of groups, 0 where no members are listed; ``inferred``: names of
    groups whose members are a guess.
    """

    states: tuple[RankState, ...]
    groups: Mapping[str, GroupInfo]
    world_size: int
    missing: tuple[str, ...] = ()
    listed: int = 0
    inferred: frozenset[str] = frozenset()


def read_dumps(paths: Iterable[Path], least_ranks: int = 0) -> Dumps:
    """Read the dumps of one job, one file a rank. ``least_ranks``: a known lower bound of the number of ranks.

    Raises:
        TraceError: two different files are of one rank, the files are of several runs, or none can be used.
    """
    missing: list[str] = []
    dumps: dict[int, Dump] = {}
    files: dict[int, Path] = {}
    unread: set[int] = set()
    for path, rank in ranks_of(sorted(paths)).items():
        if rank is None:
            missing.append(f"{path.name}: its name does not tell its rank; rename it to dump_RANK")
            continue
        try:
            dump = _parse(_load(path), rank)
        except TraceError as error:
            missing.append(
                f"rank {rank}: {path.name} {' '.join(str(error).split())}"
            )  # the line may hold damaged bytes
            unread.add(rank)
            continue
        if rank not in files:
            dumps[rank], files[rank] = dump, path
        elif dumps[rank] == dump:
            missing.append(f"rank {rank}: {path.name} is the same as {files[rank].name}, not used")
        else:
            raise TraceError(two_of_one_rank(rank, files[rank], path))
    if len(missing) > _MOST_LINES:
        missing[_MOST_LINES:] = [f"{len(missing) - _MOST_LINES} more files could not be used"]
    for find in (strangers, earlier_or_later, far_away):
        for rank, why in find(dumps).items():
            missing.append(f"rank {rank}: {files[rank].name} {why}")
            del dumps[rank], files[rank]
    if not dumps:
        raise TraceError(
            "no flight-recorder dump could be read: " + ("; ".join(missing) or "there are no files")
        )
    dumps = told_apart(dumps)
    groups: dict[str, GroupInfo] = {}
    for dump in dumps.values():
        groups.update(dump.groups)
    listed = max((max(info.members, default=-1) for info in groups.values()), default=-1) + 1
    world = max(listed, max(dumps) + 1, least_ranks)
    inferred = frozenset(name for name, info in groups.items() if not info.members)
    for name in inferred:
        groups[name] = replace(groups[name], members=_members(groups[name], dumps, world))
    empty = [rank for rank, dump in dumps.items() if not dump.entries and not dump.counts]
    if empty:
        missing.append(
            f"ranks {fold_ranks(empty)}: their dumps are empty, as when the interpreter is held up"
        )
    told = {rank: dump for rank, dump in dumps.items() if rank not in empty}
    hooked = [rank for rank, dump in told.items() if not dump.tells_ends]
    for name in {entry.group for rank in hooked for entry in told[rank].entries}:
        groups[name] = replace(groups[name], backend=_DEVICE)
    if hooked:
        missing.append(
            f"ranks {fold_ranks(hooked)}: what their devices have finished, and messages: torch's hooks record neither"
        )
    absent = sorted(set(range(world)) - set(files) - unread)
    if absent:
        missing.append(f"ranks {fold_ranks(absent)}: no dump")
    return Dumps(_states(told, groups), groups, world, tuple(missing), listed, inferred)


def parse_newest(data: bytes, rank: int) -> Dump:
    """What a dump in JSON says of this rank's newest calls: since the last that is done, and at least the last 64.

    Older calls are left out, but for the last one of each group, so that many ranks can be read often.

    Raises:
        TraceError: it is none, is damaged, or goes beyond the bounds of what is read.
    """
    content = read_json(data)
    try:
        newest, timed = _newest(content["entries"])
        return _parse({**content, "entries": newest}, rank, timed)
    except (AttributeError, LookupError, TypeError) as error:
        raise TraceError(f"is no flight-recorder dump: {type(error).__name__}: {str(error)[:80]}") from error


def _newest(entries: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], set[str]]:
    """The newest calls, and the groups of which torch had looked at the begin of a call that is left out."""
    first_open = next((at for at, one in enumerate(entries) if not _is_done(one)), len(entries))
    # The last one that torch has put away tells when the device moved last.
    moved = next((at for at in range(first_open - 1, -1, -1) if entries[at].get("retired")), first_open)
    begin = max(min(moved, len(entries) - _NEWEST), 0)
    last = {(str(one["process_group"]), one.get("is_p2p") is True): at for at, one in enumerate(entries)}
    kept = [entries[at] for at in sorted(at for at in last.values() if at < begin)] + list(entries[begin:])
    return kept, {_name(one["process_group"][0]) for one in entries[:begin] if _has_begun(one)}


def _is_done(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _has_begun(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("time_discovered_started_ns")) or entry.get("state") == "started"


def state_of(dump: Dump, rank: int) -> RankState:
    """How far the rank is by its own dump. Without the other ranks' dumps its messages have numbers of its own."""
    return _states({rank: dump}, dump.groups)[0]


def torchs_name(group: GroupInfo) -> str:
    """The name that torch has given to a group of a dump; a dump's groups have their description in their names."""
    return group.name.removesuffix(f" ({group.desc})")


def _members(info: GroupInfo, dumps: Mapping[int, Dump], world: int) -> tuple[int, ...]:
    """Likely members of a group without a list: all ranks for the default group, else the ranks with entries of it."""
    if info.desc == DEFAULT_GROUP:
        return tuple(range(world))
    return tuple(sorted(rank for rank, dump in dumps.items() if info.name in dump.groups))


def _states(dumps: Mapping[int, Dump], groups: Mapping[str, GroupInfo]) -> tuple[RankState, ...]:
    """The states of ranks: a device works in order, so it is in the oldest operation that is not finished."""
    now_ns = max((e.created_ns for dump in dumps.values() for e in dump.entries), default=0)
    with_messages = {e.group for dump in dumps.values() for e in dump.entries if e.peer >= 0}
    heads = {rank: _oldest_open(dump.entries) for rank, dump in dumps.items()}
    numbers = numbered(heads)
    streams = messages_of(dumps, heads, numbers)
    flights: dict[int, tuple[OpInFlight, ...]] = {}
    for rank, dump in dumps.items():
        ended = _ended(dump.entries)
        last: dict[str, Op] = {e.group: e.op for e in dump.entries if e.peer < 0}
        counts = {group: pair for group, pair in dump.counts.items() if group not in with_messages}
        not_begun = _not_begun(dump.entries, heads[rank])
        for group, (enqueued, completed) in (counts | _counted(dump.entries, with_messages)).items():
            op = int(last.get(group, Op.ALLREDUCE))
            # Operations of a group run one after the other, so none after the first unfinished one has begun; nor has
            # that, where the device is seen to be in something before it.
            entered = max(min(enqueued, completed + (group not in not_begun)), 0)
            last_ones = tuple(ended.get(group, ())[-_ENDED:])
            streams[rank].append(StreamProgress(group, op, -1, entered, max(completed, 0), last_ones))
        last_ns = max((e.created_ns for e in dump.entries), default=now_ns)
        flights[rank] = tuple(
            _in_flight(head, numbers.get(ends(rank, head), head.seq), dump, last_ns) for head in heads[rank]
        )
    return tuple(
        RankState(
            rank,
            True,
            -1,
            _NO_PHASE,
            now_ns * 1e-9,
            len(dump.entries),
            max((e.created_ns for e in dump.entries), default=now_ns) * 1e-9,
            now_ns * 1e-9,
            flights[rank],
            tuple(streams[rank]),
            "?",
            device=None if dump.tells_ends else DeviceCalls((), tuple(streams[rank]), is_whole=False),
        )
        for rank, dump in sorted(dumps.items())
    )


def _oldest_open(entries: Sequence[DumpedCall]) -> tuple[DumpedCall, ...]:
    """The oldest call that is not done, if there is one; of a batch of messages, which have one number, all."""
    waiting = [e for e in entries if not e.done]
    oldest = min(waiting, key=lambda e: e.created_ns, default=None)
    if oldest is None:
        return ()
    batch = [e for e in waiting if e.peer >= 0 and (e.group, e.seq) == (oldest.group, oldest.seq)]
    return (oldest,) if oldest.peer < 0 else tuple(batch)


def _not_begun(entries: Sequence[DumpedCall], heads: Sequence[DumpedCall]) -> set[str]:
    """The groups whose first unfinished collective the device has not begun, as it is in a call before it."""
    first: dict[str, DumpedCall] = {}
    for one in entries:
        if not one.done and one.peer < 0:
            first.setdefault(one.group, one)
    return {group for group, one in first.items() if one.begun is False and one not in heads}


def _ended(entries: Sequence[DumpedCall]) -> dict[str, list[OpEnded]]:
    """The collectives that are done, by group, oldest first."""
    found: dict[str, list[OpEnded]] = {}
    for entry in entries:
        if entry.done and entry.peer < 0:
            one, op = entry.content, int(entry.op)
            found.setdefault(entry.group, []).append(
                OpEnded(entry.seq, op, one.bytes, one.element, site=one.site)
            )
    return found


def _in_flight(entry: DumpedCall, seq: int, dump: Dump, last_ns: int) -> OpInFlight:
    one = entry.content
    # A device that was seen to begin it is in it, whatever its host has enqueued since.
    since_ns = last_ns if entry.begun else entry.created_ns
    return OpInFlight(
        entry.group, int(entry.op), entry.peer, seq, since_ns * 1e-9, one.site,
        bytes=one.bytes, element=one.element, usual=_usual(entry, dump), begun=entry.begun,
    )  # fmt: skip


def _usual(entry: DumpedCall, dump: Dump) -> int:
    """How often the rank had made this call at this place before; of a message: how many it had had with this peer.

    -1: too little is known.
    """
    if entry.peer >= 0:
        same = [
            one for one in dump.entries if (one.group, one.peer) == (entry.group, entry.peer) and one.done
        ]
        return len(same) if same or dump.is_whole else -1
    calls = [one for one in dump.entries if one.peer < 0]
    if not entry.content.site or entry not in calls:
        return -1
    numbers: dict[tuple[str, Op, str], int] = {}
    alike = [numbers.setdefault((one.group, one.op, one.content.site), len(numbers)) for one in calls]
    return usual(np.array(alike, np.uint64), calls.index(entry))


def _looked_at(entries: Sequence[DumpedCall], timed: Collection[str]) -> list[DumpedCall]:
    """The calls, with an unknown begin where torch did not look: it does so from some call of a group on.

    ``timed``: groups of which it had done so before these calls.
    """
    found: list[DumpedCall] = []
    known = set(timed)
    for one in entries:
        if one.begun:
            known.add(one.group)
        found.append(one if one.group in known else replace(one, begun=None))
    return found


def _load(path: Path) -> Any:
    """The content of a dump as plain data. Errors go on after the file's name."""
    try:
        data = read_regular(path, MOST_BYTES)
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror}") from error
    if not data:
        raise TraceError("is empty: its process was killed before it could write it")
    return read_json(data) if data[:1] in (b"{", b"[") else read_pickle(data)


def _parse(content: Any, rank: int, timed: Collection[str] = ()) -> Dump:
    """What a dump says. ``timed``: groups of which torch had looked at the begin of older calls, which are left out."""
    if not isinstance(content, dict) or "entries" not in content:
        raise TraceError("is no flight-recorder dump: it has no entries")
    dump = cast("dict[str, Any]", content)
    version = dump.get("version", "unknown")
    if not isinstance(version, str):
        raise TraceError("is no flight-recorder dump: its version is no text")
    if not version.startswith("2."):
        raise TraceError(f"has dump version {version[:20]}; versions 2.x are understood")
    try:
        groups, unnamed = _groups(dump.get("pg_config") or {})
        raw: list[dict[str, Any]] = list(dump["entries"] or ())
        if len(raw) > MOST_CALLS:
            raise TraceError(
                f"has {len(raw)} calls, of which {MOST_CALLS} are read; set TORCH_FR_BUFFER_SIZE lower"
            )
        status: Mapping[Any, Any] = dump.get("pg_status") or {}
        if not groups:
            groups, status = _unlisted(raw, unnamed), {}
        names = _names(groups, status, raw)
        tells_ends = not any(str(e["profiling_name"]).startswith(_BY_HOOKS) for e in raw)
        counts = _counts(status, names, groups) if tells_ends else {}  # hooks count from 0
        entries = [
            one for one in (_entry(e, groups, rank) for e in recorded(settled(raw))) if one is not None
        ]
        if not tells_ends:
            entries = [one for one in entries if one.op not in MESSAGES]  # hooks do not say with whom
        entries.sort(key=lambda one: (one.created_ns, one.seq))
        entries = merged(entries)
        if all(str(e["profiling_name"]).startswith("nccl:") for e in raw):
            entries = without_overtaken(entries)  # Gloo does several at a time
        # What torch's watchdog has not put away has the time of this dump.
        moves = (_whole(e.get(_ENDED_NS) or 0) for e in raw if e.get("retired"))
        moved_ns = max(moves, default=0)
        entries = _looked_at(entries, timed)
    except (AttributeError, LookupError, TypeError, ValueError, SyntaxError, OverflowError) as error:
        raise TraceError(f"is damaged: {type(error).__name__}: {str(error)[:80]}") from error
    told = {entry.group for entry in entries if entry.peer < 0}
    counts |= _counted(entries, told - counts.keys())  # dumps of older versions lack it
    label = {key: info.name for key, info in groups.items()}
    return Dump(
        {info.name: info for info in groups.values()},
        {label[key]: pair for key, pair in counts.items()},
        [replace(entry, group=label[entry.group]) for entry in entries],
        any(one.get("record_id") == 0 for one in raw),
        tells_ends,
        moved_ns,
    )


def _counted(entries: Sequence[DumpedCall], groups: Collection[str]) -> dict[str, tuple[int, int]]:
    """The last collective enqueued and completed, by group, of those groups that have any in the entries."""
    told: dict[str, list[DumpedCall]] = {}
    for entry in entries:
        if entry.peer < 0 and entry.group in groups:
            told.setdefault(entry.group, []).append(entry)
    found: dict[str, tuple[int, int]] = {}
    for group, own in told.items():
        done = [entry.seq for entry in own if entry.done]
        first_open = min((entry.seq for entry in own if not entry.done), default=max(done, default=0) + 1)
        found[group] = max(entry.seq for entry in own), first_open - 1
    return found


def _groups(config: Mapping[Any, Mapping[str, Any]]) -> tuple[dict[str, GroupInfo], tuple[int, ...]]:
    """The groups that are listed by name, and the members of one without a name, which is Gloo's default group."""
    found: dict[str, GroupInfo] = {}
    unnamed: tuple[int, ...] = ()
    total = 0
    for key, one in config.items():
        members = _ranks(one.get("ranks", "[]"))
        total += len(members)
        if any(rank < 0 or rank >= MOST_RANKS for rank in members) or total > _MOST_MEMBERS:
            raise ValueError(f"group {_name(key)} has impossible ranks")
        if not key:
            unnamed = members
        else:
            found[_name(key)] = _group(_name(key), members, _name(one.get("desc", "")))
    return found, unnamed


def _ranks(listed: Any) -> tuple[int, ...]:
    """The members of a group, which a dump lists as text."""
    if isinstance(listed, str):
        found = _RANKS.fullmatch(listed.strip())
        if found is None:
            raise ValueError(f"{listed[:20]!r} is no list of ranks")
        listed = found[1].split(",") if found[1] else ()
    return tuple(int(rank) for rank in listed)


def _name(value: Any) -> str:
    """A short text or a number, as text. Raises ValueError for anything else."""
    if not isinstance(value, (str, int)):
        raise ValueError(f"a {type(value).__name__} is where a name should be")
    return str(value)[:_MOST_LETTERS]


def _whole(value: Any) -> int:
    """A sequence number or time. Raises ValueError for anything else."""
    number = int(value)
    if not -1 <= number < _MOST_NUMBER:
        raise ValueError(f"{str(value)[:40]} is no number of a call, and no time")
    return number


def _unlisted(entries: Sequence[Mapping[str, Any]], default: tuple[int, ...]) -> dict[str, GroupInfo]:
    """The groups named in entries, without members but for those of the ``default`` group, where they are known."""
    found: dict[str, GroupInfo] = {}
    for entry in entries:
        key, desc = (_name(word) for word in entry["process_group"][:2])
        if key not in found:
            desc = "" if desc == "undefined" else desc
            found[key] = _group(key, default if desc == DEFAULT_GROUP else (), desc)
    return found


def _group(key: str, members: tuple[int, ...], desc: str) -> GroupInfo:
    return GroupInfo(f"{key} ({desc})" if desc else key, members, "", desc)


def _names(
    groups: Mapping[str, GroupInfo], status: Mapping[Any, Any], entries: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """The names of groups by the numbers under which their counts are listed.

    Entries hold both. Groups without an entry are matched by order: numbers and numeric names both grow as groups are
    made.
    """
    told = {_name(entry["pg_id"]): _name(entry["process_group"][0]) for entry in entries if "pg_id" in entry}
    numbers = [_name(key) for key in status]
    if len(numbers) == len(groups) and all(word.isdigit() for word in (*numbers, *groups)):
        ordered = dict(zip(sorted(numbers, key=int), sorted(groups, key=int), strict=True))
        if all(ordered.get(number) == name for number, name in told.items()):
            return ordered
    return told


def _counts(
    status: Mapping[Any, Mapping[str, Any]], names: Mapping[str, str], groups: Mapping[str, GroupInfo]
) -> dict[str, tuple[int, int]]:
    return {
        names[_name(key)]: (_whole(one["last_enqueued_collective"]), _whole(one["last_completed_collective"]))
        for key, one in status.items()
        if names.get(_name(key)) in groups
    }


def _entry(entry: Mapping[str, Any], groups: Mapping[str, GroupInfo], rank: int) -> DumpedCall | None:
    """An entry; None for an operation of an unknown kind, or of a group that the dump does not describe."""
    group = _name(entry["process_group"][0])
    title = _name(entry["profiling_name"]).split(":", 1)[-1]
    op = next((op for word, op in _OPS if word in title.lower()), None)
    if op is None or group not in groups:
        return None
    peer = -1
    message = _P2P.match(title)
    if message is not None:
        members = groups[group].members
        here, there = int(message[2]), int(message[3])
        if not members:
            return None
        if rank not in members:
            told = f"has messages of {group}, which is between ranks {fold_ranks(members)}"
            raise TraceError(f"{told}: the dump of another rank under this rank's name")
        peer = members[there if here == members.index(rank) else here]
    seq = _whole(entry["p2p_seq_id"] if peer >= 0 else entry["collective_seq_id"])
    done = _is_done(entry)
    created_ns, content = _whole(entry.get("time_created_ns") or 0), content_of(entry, op)
    return DumpedCall(group, op, peer, seq, created_ns, done, content, _has_begun(entry))
