"""The present state of a rank: its operations in flight, its progress in every stream, and its process."""

from __future__ import annotations

import asyncio
import math
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from keepstep.agent.ranks.device_calls import device_calls
from keepstep.agent.ranks.event_buffer import Rows
from keepstep.agent.ranks.last_calls import LastCalls
from keepstep.agent.ranks.left_loop import left_loop
from keepstep.agent.ranks.track import USUAL, RankTrack
from keepstep.agent.sensors.activity import py_spy
from keepstep.core.events import TIMEOUT_NOTE, Kind, element_of, reduction_of
from keepstep.core.launched import Launched
from keepstep.core.summary import (
    DeviceCalls,
    GroupInfo,
    LinkState,
    OpInFlight,
    RankState,
    Stillness,
    StreamProgress,
)
from keepstep.core.within import within
from keepstep.ring import RETIRED
from keepstep.traces.dump_sets import Dump

_MOST_IN_FLIGHT = 256
_SITE_CHARACTERS = 200
_STACK_S = 5.0
_STACK_CHARACTERS = 20_000
_NO_CALLS = LastCalls()


def operations_in_flight(
    rows: Rows, groups: Sequence[GroupInfo], sites: Sequence[str] = (), calls: LastCalls = _NO_CALLS
) -> tuple[OpInFlight, ...]:
    """The operations among the ring's records in flight, by the time they were entered; at most the newest 256."""
    rows = _operations(rows)
    fields = rows[["group", "op", "peer", "seq", "start_ns", "site", "wait_ns"]].tolist()
    content = rows[["ticket", "bytes", "flags", "thread"]].tolist()
    return tuple(
        OpInFlight(
            _name(groups, group), op, peer, seq, start_ns * 1e-9, _site(sites, site), wait_ns > 0,
            bytes=nbytes, element=element_of(flags), reduction=reduction_of(flags),
            usual=calls.usual.get(ticket, -1), thread=thread,
        )
        for (group, op, peer, seq, start_ns, site, wait_ns), (ticket, nbytes, flags, thread)
        in zip(fields, content, strict=True)
    )  # fmt: skip


def last_failed(
    track: RankTrack, in_flight: Rows, sites: Sequence[str] = (), calls: LastCalls = _NO_CALLS
) -> tuple[OpInFlight, ...]:
    """The operations in which a rank failed: those that were under way at the first of the latest failures.

    What it entered later failed as a consequence, such as a barrier in a ``finally``. None where the rank has gone on
    since and is in another operation.
    """
    if track.failed is None:
        return ()
    gave_up_ns = int(track.failed["end_ns"].min())
    if bool((_operations(in_flight)["start_ns"] > gave_up_ns).any()):
        return ()
    return _located(track, track.failed[track.failed["start_ns"] < gave_up_ns], sites, calls)


def _operations(rows: Rows) -> Rows:
    """The operations among records, by the time they were entered; at most the newest 256."""
    rows = rows[rows["kind"] != Kind.PHASE]
    return rows[rows["start_ns"].argsort(kind="stable")][-_MOST_IN_FLIGHT:]


def _located(
    track: RankTrack, rows: Rows, sites: Sequence[str], calls: LastCalls = _NO_CALLS
) -> tuple[OpInFlight, ...]:
    """The operations among records, with what the rank's latest iterations tell about them."""
    rows = _operations(rows)
    if not len(rows):
        return ()
    usual = track.usual_operations()
    ends = zip(rows["end_ns"].tolist(), rows[USUAL].tolist(), strict=True)
    return tuple(
        replace(one, failed_s=end_ns * 1e-9, repeats=same in usual)
        for one, (end_ns, same) in zip(
            operations_in_flight(rows, track.groups, sites, calls), ends, strict=True
        )
    )


def rank_state(
    track: RankTrack,
    in_flight: Rows,
    streams: Rows,
    process_state: str,
    now_ns: int,
    stack: str = "",
    sites: Sequence[str] = (),
    unread_bytes: int = 0,
    process: int = 0,
    links: tuple[LinkState, ...] = (),
    stillness: Stillness | None = None,
    calls: LastCalls = _NO_CALLS,
    incarnation: int = -1,
    dump: Dump | Literal["mute"] | None = None,
    launched: tuple[Launched, ...] = (),
    communicators_settled: bool = False,
) -> RankState:
    """The state of one rank.

    ``process_state``: as in ``/proc/PID/stat``, empty if the process is gone. ``sites``: lines of code, by site number.
    ``calls``: its last collectives. ``dump``: what torch's flight recorder holds in its process; "mute": that did not
    answer. ``launched``: what NCCL's RAS tells.
    ``communicators_settled``: whether NCCL makes and ends no communicator in it.
    """
    phase, since_ns = track.phase()
    if track.failed is not None:
        in_flight = in_flight[~np.isin(in_flight["ticket"], track.failed["ticket"])]
    progress = _progress(track, streams, calls)
    return RankState(
        rank=track.rank,
        alive=process_state not in ("", "Z", "X"),
        step=track.cutter.step,
        phase=phase,
        phase_since_s=since_ns * 1e-9,
        progress=track.progress,
        last_progress_s=track.last_progress_ns * 1e-9,
        now_s=now_ns * 1e-9,
        in_flight=_located(track, in_flight, sites, calls),
        streams=progress,
        process_state=process_state,
        stack=stack,
        microbatch=track.cutter.microbatch(),
        unread_bytes=unread_bytes,
        process=process,
        links=links,
        stillness=stillness,
        timeout_s=_longest_timeout_s(sites),
        pause_s=track.watch.hang.longest_pause_s,
        failed=last_failed(track, in_flight, sites, calls),
        incarnation=incarnation,
        device=DeviceCalls(answered=False) if dump == "mute" else _device(track, progress, dump),
        launched=launched,
        communicators_settled=communicators_settled,
    )


def know_device(track: RankTrack, progress: int, dump: Dump, streams: Rows, now_ns: int) -> None:
    """Tell a track what the flight recorder of its process held when it had made this progress."""
    still_s = max(time.time() - dump.moved_ns * 1e-9, 0.0) if dump.moved_ns else math.inf
    track.know_device(progress, _device(track, _progress(track, streams, _NO_CALLS), dump), now_ns, still_s)


def _progress(track: RankTrack, streams: Rows, calls: LastCalls) -> tuple[StreamProgress, ...]:
    table = streams[["group", "op", "peer", "started", "completed"]].tolist()
    return tuple(
        StreamProgress(
            _name(track.groups, group),
            op,
            peer,
            started,
            completed,
            calls.ended.get(group, ()) if peer < 0 else (),
        )
        for group, op, peer, started, completed in table
    )


def _device(track: RankTrack, streams: Sequence[StreamProgress], dump: Dump | None) -> DeviceCalls | None:
    # The recorder's times are those of the clock on the wall.
    ago_s = time.time() - time.monotonic()
    return None if dump is None else device_calls(dump, track.rank, track.groups, streams, ago_s)


def _longest_timeout_s(sites: Sequence[str]) -> float:
    """The longest timeout of a group, as the worker has noted it among the sites; 0 where it has not."""
    told = [one.removeprefix(TIMEOUT_NOTE) for one in sites if one.startswith(TIMEOUT_NOTE)]
    return max((float(one) for one in told if one.replace(".", "").isdigit()), default=0.0)


def main_site(sites: Sequence[str], calls: LastCalls) -> str:
    """The line of code from which a rank made most of its last operations; "" where it is not known."""
    return _site(sites, calls.main_site) if calls.main_site else ""


async def loop_left(stack: str, site: str) -> str:
    """As `left_loop`; empty where the script's file system does not answer, too."""
    try:
        return await within(_STACK_S, asyncio.to_thread(left_loop, stack, site)) if stack and site else ""
    except asyncio.TimeoutError:
        return ""


async def python_stack(pid: int) -> str:
    """The Python stacks of a process as py-spy prints them; empty if there is no py-spy, or it takes over 5 s."""
    program = py_spy()
    if program is None:
        return ""
    words = program, "dump", "--nonblocking", "--pid", str(pid)
    process = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
    try:
        output, _ = await within(_STACK_S, process.communicate())
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        return ""
    return output.decode(errors="replace")[:_STACK_CHARACTERS]


def _site(sites: Sequence[str], site: int) -> str:
    return sites[site][-_SITE_CHARACTERS:] if site < len(sites) else ""


def _name(groups: Sequence[GroupInfo], group: int) -> str:
    known = groups[group] if 0 <= group < len(groups) else RETIRED
    return f"?{group}" if known is RETIRED else known.name
