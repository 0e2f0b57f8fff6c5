"""PyTorch flight-recorder dumps (versions 2.x): how far each rank's device is, from what its host has enqueued.

Readable are the pickles that ``TORCH_NCCL_DUMP_ON_TIMEOUT`` and ``torch.distributed`` write, by an unpickler that makes
plain data only, and their JSON form. The rank is the number at the end of the file's name, as torch names the files.

Dumps of Gloo jobs list no members of groups, and their counts of enqueued operations include messages without entries.
There, the members of a group are the ranks with entries of it, and counts are taken from the entries.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from keepstep.core.errors import TraceError
from keepstep.core.events import Op
from keepstep.core.habits import usual
from keepstep.core.ranges import fold_ranks
from keepstep.core.summary import GroupInfo, OpEnded, OpInFlight, RankState, StreamProgress
from keepstep.traces.recorded_content import Content, content_of

MOST_BYTES = 256 << 20
_NO_PHASE = -1
_ENDED = 64  # calls of a group that are told
_DEFAULT_GROUP = "default_pg"
_NAME = re.compile(r"(\d+)(\.json|\.pickle|\.pkl)?$")
_P2P = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)$")
_OPS: tuple[tuple[str, Op], ...] = (
    ("reduce_scatter", Op.REDUCE_SCATTER), ("all_gather", Op.ALLGATHER), ("allgather", Op.ALLGATHER),
    ("all_to_all", Op.ALLTOALL), ("alltoall", Op.ALLTOALL), ("all_reduce", Op.ALLREDUCE),
    ("allreduce", Op.ALLREDUCE), ("barrier", Op.BARRIER), ("broadcast", Op.BROADCAST), ("gather", Op.GATHER),
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


@dataclass(frozen=True, slots=True)
class _Entry:
    group: str
    op: Op
    peer: int  # global rank of the other end of a message; -1 for collectives
    seq: int
    created_ns: int
    done: bool
    content: Content


@dataclass(frozen=True, slots=True)
class _Dump:
    groups: Mapping[str, GroupInfo]
    counts: Mapping[str, tuple[int, int]]  # by group: the last operation enqueued, the last completed
    entries: Sequence[_Entry]


def rank_of(path: Path) -> int | None:
    """The rank that a dump is named after; None when the name ends with no number."""
    found = _NAME.search(path.name)
    return int(found[1]) if found else None


def read_dumps(paths: Iterable[Path], least_ranks: int = 0) -> Dumps:
    """Read the dumps of one job, one file a rank. ``least_ranks``: a known lower bound of the number of ranks.

    Raises:
        TraceError: two different files are of one rank, or none can be used.
    """
    missing: list[str] = []
    dumps: dict[int, _Dump] = {}
    files: dict[int, Path] = {}
    for path in sorted(paths):
        rank = rank_of(path)
        if rank is None:
            missing.append(f"{path.name}: its name does not end with a rank")
            continue
        if rank in files:
            if files[rank].read_bytes() == path.read_bytes():
                missing.append(f"rank {rank}: {path.name} is the same as {files[rank].name}, not used")
                continue
            raise TraceError(
                f"{path}: rank {rank} has another dump, {files[rank].name}; keep those of one hang"
            )
        files[rank] = path
        try:
            dumps[rank] = _parse(_load(path), rank)
        except TraceError as error:
            missing.append(f"rank {rank}: {' '.join(str(error).split())}")  # it may hold damaged bytes
    if not dumps:
        raise TraceError(
            "no flight-recorder dump could be read: " + ("; ".join(missing) or "there are no files")
        )
    for rank, why in _strangers(dumps).items():
        missing.append(f"rank {rank}: {files[rank].name} {why}")
        del dumps[rank]
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
    absent = sorted(set(range(world)) - set(files))
    if absent:
        missing.append(f"ranks {fold_ranks(absent)}: no dump")
    return Dumps(_states(told, groups), groups, world, tuple(missing), listed, inferred)


def _strangers(dumps: Mapping[int, _Dump]) -> dict[int, str]:
    """Ranks whose dumps do not belong to the job of the others, and why."""
    lists: dict[str, Counter[tuple[int, ...]]] = {}
    for dump in dumps.values():
        for name, info in dump.groups.items():
            if info.members:
                lists.setdefault(name, Counter())[info.members] += 1
    usual = {name: counts.most_common(1)[0][0] for name, counts in lists.items()}
    found: dict[int, str] = {}
    for rank, dump in dumps.items():
        known = [info for info in dump.groups.values() if info.members]
        other = next((info for info in known if info.members != usual[info.name]), None)
        if other is not None:
            found[rank] = f"is of another job: its group {other.name} has ranks {fold_ranks(other.members)}"
        elif known and not any(rank in info.members for info in known):
            everybody = {member for info in known for member in info.members}
            found[rank] = f"is of no rank {rank}: its groups have ranks {fold_ranks(everybody)}; rename it"
    return found if len(found) < len(dumps) else {}


def _members(info: GroupInfo, dumps: Mapping[int, _Dump], world: int) -> tuple[int, ...]:
    """Likely members of a group without a list: all ranks for the default group, else the ranks with entries of it."""
    if info.desc == _DEFAULT_GROUP:
        return tuple(range(world))
    return tuple(sorted(rank for rank, dump in dumps.items() if info.name in dump.groups))


def _states(dumps: Mapping[int, _Dump], groups: Mapping[str, GroupInfo]) -> tuple[RankState, ...]:
    """The states of ranks: a device works in order, so it is in the oldest operation that is not finished."""
    now_ns = max((e.created_ns for dump in dumps.values() for e in dump.entries), default=0)
    # For each group, whether it has collectives (False) and messages (True).
    kinds: dict[str, set[bool]] = {}
    for dump in dumps.values():
        for entry in dump.entries:
            kinds.setdefault(entry.group, set()).add(entry.peer >= 0)
    streams: dict[int, list[StreamProgress]] = {rank: [] for rank in dumps}
    flights: dict[int, OpInFlight] = {}
    for rank, dump in dumps.items():
        ended = _ended(dump.entries)
        last: dict[str, Op] = {e.group: e.op for e in dump.entries if e.peer < 0}
        for group, (enqueued, completed) in dump.counts.items():
            if True not in kinds.get(group, set()):
                op = int(last.get(group, Op.ALLREDUCE))
                # Operations of a group run one after the other, so none after the first unfinished one has begun.
                entered = max(min(enqueued, completed + 1), 0)
                last_ones = tuple(ended.get(group, ())[-_ENDED:])
                streams[rank].append(StreamProgress(group, op, -1, entered, max(completed, 0), last_ones))
        oldest = min((e for e in dump.entries if not e.done), key=lambda e: e.created_ns, default=None)
        if oldest is not None:
            flights[rank] = _in_flight(oldest, dump.entries)
    for rank, flight in flights.items():
        if flight.peer < 0:
            continue
        streams[rank].append(StreamProgress(flight.group, flight.op, flight.peer, flight.seq, flight.seq - 1))
        other = dumps.get(flight.peer)
        if other is not None:
            op = int(Op.SEND if flight.op == Op.RECV else Op.RECV)
            seen = [e for e in other.entries if (e.group, e.op, e.peer) == (flight.group, op, rank)]
            enqueued, completed = other.counts.get(flight.group, (0, 0))
            enqueued = max([enqueued, *(e.seq for e in seen)])
            streams[flight.peer].append(StreamProgress(flight.group, op, rank, enqueued, completed))
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
            (flights[rank],) if rank in flights else (),
            tuple(streams[rank]),
            "?",
        )
        for rank, dump in sorted(dumps.items())
    )


def _ended(entries: Sequence[_Entry]) -> dict[str, list[OpEnded]]:
    """The collectives that are done, by group, oldest first."""
    found: dict[str, list[OpEnded]] = {}
    for entry in entries:
        if entry.done and entry.peer < 0:
            one, op = entry.content, int(entry.op)
            found.setdefault(entry.group, []).append(
                OpEnded(entry.seq, op, one.bytes, one.element, site=one.site)
            )
    return found


def _in_flight(entry: _Entry, entries: Sequence[_Entry]) -> OpInFlight:
    one = entry.content
    return OpInFlight(
        entry.group, int(entry.op), entry.peer, entry.seq, entry.created_ns * 1e-9, one.site,
        bytes=one.bytes, element=one.element, usual=_usual(entry, entries),
    )  # fmt: skip


def _usual(entry: _Entry, entries: Sequence[_Entry]) -> int:
    """How often the rank had made this call at this place before; -1 if too little is known."""
    calls = [one for one in entries if one.peer < 0]
    if not entry.content.site or entry not in calls:
        return -1
    numbers: dict[tuple[str, Op, str], int] = {}
    alike = [numbers.setdefault((one.group, one.op, one.content.site), len(numbers)) for one in calls]
    return usual(np.array(alike, np.uint64), calls.index(entry))


def _load(path: Path) -> Any:
    """The content of a dump as plain data."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise TraceError(f"{path.name} has {size} bytes, more than the {MOST_BYTES} that a dump may have")
        data = path.read_bytes()
    except OSError as error:
        raise TraceError(f"{path.name} cannot be read: {error.strerror}") from error
    if not data:
        raise TraceError(f"{path.name} is empty: its process was killed before it could write it")
    try:
        if data[:1] in (b"{", b"["):
            return json.loads(data)
        return _PlainUnpickler(io.BytesIO(data)).load()
    except (MemoryError, RecursionError) as error:
        raise TraceError(f"{path.name} is no flight-recorder dump ({type(error).__name__})") from error
    except TraceError:
        raise
    except Exception as error:
        cut = isinstance(error, EOFError) or "truncated" in str(error) or "ran out" in str(error).lower()
        what = "was cut short" if cut else "is neither a pickle nor JSON"
        raise TraceError(f"{path.name} {what}: {str(error)[:80] or type(error).__name__}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles lists, dicts, strings and numbers only: a dump holds nothing else."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise TraceError(f"holds an object of {module_name}.{global_name}: no flight-recorder dump does")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise TraceError("refers to data outside of it: no flight-recorder dump does")


def _parse(content: Any, rank: int) -> _Dump:
    if not isinstance(content, dict) or "entries" not in content:
        raise TraceError("is no flight-recorder dump: it has no entries")
    dump = cast("dict[str, Any]", content)
    version = str(dump.get("version", "unknown"))
    if not version.startswith("2."):
        raise TraceError(f"has dump version {version}; versions 2.x are understood")
    try:
        groups = _groups(dump.get("pg_config") or {})
        raw: list[dict[str, Any]] = list(dump["entries"] or ())
        status: Mapping[Any, Any] = dump.get("pg_status") or {}
        if not groups:
            groups, status = _unlisted(raw), {}
        names = _names(groups, status, raw)
        counts = _counts(status, names, groups)
        entries = [one for one in (_entry(e, groups, rank) for e in raw) if one is not None]
        entries.sort(key=lambda one: (one.created_ns, one.seq))
    except (AttributeError, LookupError, TypeError, ValueError, SyntaxError, OverflowError) as error:
        raise TraceError(f"is damaged: {type(error).__name__}: {str(error)[:80]}") from error
    told = {key: [entry for entry in entries if entry.group == key and entry.peer < 0] for key in groups}
    for key, own in told.items():
        if own and key not in counts:  # as in dumps of older versions
            done = [entry.seq for entry in own if entry.done]
            first_open = min((entry.seq for entry in own if not entry.done), default=max(done, default=0) + 1)
            counts[key] = max(entry.seq for entry in own), first_open - 1
    label = {key: info.name for key, info in groups.items()}
    return _Dump(
        {info.name: info for info in groups.values()},
        {label[key]: pair for key, pair in counts.items()},
        [replace(entry, group=label[entry.group]) for entry in entries],
    )


def _groups(config: Mapping[Any, Mapping[str, Any]]) -> dict[str, GroupInfo]:
    found: dict[str, GroupInfo] = {}
    for key, one in config.items():
        ranks = one.get("ranks", "[]")
        members = tuple(int(rank) for rank in (ast.literal_eval(ranks) if isinstance(ranks, str) else ranks))
        if not key and not members:
            continue  # Gloo writes such a group
        if any(rank < 0 or rank >= 1 << 24 for rank in members):
            raise ValueError(f"group {key} has impossible ranks")
        desc = str(one.get("desc", ""))
        found[str(key)] = _group(str(key), members, desc)
    return found


def _unlisted(entries: Sequence[Mapping[str, Any]]) -> dict[str, GroupInfo]:
    """The groups named in entries, without members."""
    found: dict[str, GroupInfo] = {}
    for entry in entries:
        key, desc = (str(word) for word in entry["process_group"][:2])
        desc = "" if desc == "undefined" else desc
        found[key] = _group(key, (), desc)
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
    told = {str(entry["pg_id"]): str(entry["process_group"][0]) for entry in entries if "pg_id" in entry}
    numbers = [str(key) for key in status]
    if len(numbers) == len(groups) and all(word.isdigit() for word in (*numbers, *groups)):
        ordered = dict(zip(sorted(numbers, key=int), sorted(groups, key=int), strict=True))
        if all(ordered.get(number) == name for number, name in told.items()):
            return ordered
    return told


def _counts(
    status: Mapping[Any, Mapping[str, Any]], names: Mapping[str, str], groups: Mapping[str, GroupInfo]
) -> dict[str, tuple[int, int]]:
    return {
        names[str(key)]: (int(one["last_enqueued_collective"]), int(one["last_completed_collective"]))
        for key, one in status.items()
        if names.get(str(key)) in groups
    }


def _entry(entry: Mapping[str, Any], groups: Mapping[str, GroupInfo], rank: int) -> _Entry | None:
    """An entry; None for an operation of an unknown kind, or of a group that the dump does not describe."""
    group = str(entry["process_group"][0])
    title = str(entry["profiling_name"]).split(":", 1)[-1]
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
    seq = int(entry["p2p_seq_id"] if peer >= 0 else entry["collective_seq_id"])
    done = bool(entry.get("retired")) or entry.get("state") == "completed"
    return _Entry(group, op, peer, seq, int(entry.get("time_created_ns") or 0), done, content_of(entry, op))
