"""The present state of a rank: its operations in flight, its progress in every stream, and its process."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence

from keepstep.agent.ranks.event_buffer import Rows
from keepstep.agent.ranks.track import RankTrack
from keepstep.agent.sensors.activity import py_spy
from keepstep.core.events import Kind
from keepstep.core.summary import GroupInfo, LinkState, OpInFlight, RankState, Stillness, StreamProgress
from keepstep.core.within import within

_MOST_IN_FLIGHT = 256
_SITE_CHARACTERS = 200
_STACK_S = 5.0
_STACK_CHARACTERS = 20_000


def operations_in_flight(
    rows: Rows, groups: Sequence[GroupInfo], sites: Sequence[str] = ()
) -> tuple[OpInFlight, ...]:
    """The operations among the ring's records in flight, by the time they were entered; at most the newest 256."""
    rows = rows[rows["kind"] != Kind.PHASE]
    rows = rows[rows["start_ns"].argsort(kind="stable")][-_MOST_IN_FLIGHT:]
    fields = rows[["group", "op", "peer", "seq", "start_ns", "site", "wait_ns"]].tolist()
    return tuple(
        OpInFlight(_name(groups, group), op, peer, seq, start_ns * 1e-9, _site(sites, site), wait_ns > 0)
        for group, op, peer, seq, start_ns, site, wait_ns in fields
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
    timeout_s: float = 0.0,
) -> RankState:
    """The state of one rank.

    ``process_state``: as in ``/proc/PID/stat``, empty if the process is gone. ``sites``: lines of code, by site number.
    """
    phase, since_ns = track.phase()
    table = streams[["group", "op", "peer", "started", "completed"]].tolist()
    return RankState(
        rank=track.rank,
        alive=process_state not in ("", "Z", "X"),
        step=track.cutter.step,
        phase=phase,
        phase_since_s=since_ns * 1e-9,
        progress=track.progress,
        last_progress_s=track.last_progress_ns * 1e-9,
        now_s=now_ns * 1e-9,
        in_flight=operations_in_flight(in_flight, track.groups, sites),
        streams=tuple(StreamProgress(_name(track.groups, group), *others) for group, *others in table),
        process_state=process_state,
        stack=stack,
        microbatch=track.cutter.microbatch(),
        unread_bytes=unread_bytes,
        process=process,
        links=links,
        stillness=stillness,
        timeout_s=timeout_s,
    )


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
    return groups[group].name if 0 <= group < len(groups) else f"?{group}"
