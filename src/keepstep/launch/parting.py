"""How a node parts from its job: what storage is to have gets there, the others hear of it, and all processes end."""

from __future__ import annotations

import asyncio
from typing import Any

from keepstep.launch.course import Outcome, Parts
from keepstep.launch.workers import incarnation

_EXIT_BARRIER_S = 300.0
_DRAIN_S = 1.0
_FAILED_WAIT_S = 60.0
_NEXT_LEADER_S = 60.0  # most seconds until the controller's next host says that all nodes have finished


async def say_goodbye(parts: Parts, outcome: Outcome) -> int:
    """Part from the job and end what runs beside the workers; returns the exit code."""
    run, course, controller = parts.run, parts.course, parts.controller
    if outcome.kind == "stopped" and (outcome.code or course.stopped_by_hand):
        run.say(f"the job was ended: {outcome.reason}")
    if not course.has_parted:
        await part(parts, outcome)
    await controller.settled()
    await parts.watching.end()
    if course.link:
        await course.link.close()
    await controller.stop()
    await sweep(parts)
    parts.watching.close()
    parts.caching.close()
    code = course.stop_code if outcome.kind == "finished" and course.stop_code else outcome.code
    if controller.is_here:
        run.ended(code, outcome.reason)
    return code


async def sweep(parts: Parts) -> None:
    """End what workers have left behind, but no program of ours, and no process that waits to play a rank."""
    ours = parts.watching.pids | parts.crew.restarts.pids | {parts.run.processes.guard.pid}
    if parts.controller.pid:
        ours |= {parts.controller.pid}
    await incarnation.sweep(ours, parts.course.kill_now)


async def part(parts: Parts, outcome: Outcome) -> None:
    """Wait for what is on its way to storage, say that this node has ended, and wait for the other nodes."""
    course = parts.course
    course.has_parted = True
    await _wait_for_storage(parts, outcome)
    if course.link:
        course.link.send(course.link.member.ended(outcome.code, outcome.reason))
        await course.link.drained(_DRAIN_S)
        if course.place is None and not course.job_over.is_set():
            await course.link.unseated(_DRAIN_S)
        await _wait_for_others(parts, outcome)


async def _wait_for_storage(parts: Parts, outcome: Outcome) -> None:
    """Keep the cache, which ends with this process, until what was to be on storage is there."""
    run, course, persisting = parts.run, parts.course, parts.run.job.persisting
    if persisting is None:
        return
    briefly_s = min(persisting.wait_s, _FAILED_WAIT_S)
    wait_s = {
        "finished": persisting.wait_s,
        "failed": briefly_s,
        "alone": briefly_s,
        "stopped": briefly_s if course.stopped_by_hand else 0.0,
    }.get(outcome.kind, 0.0)

    def in_vain() -> bool:
        over = course.job_over.is_set() and not course.stopped_by_hand
        interrupted = course.kill_now.is_set() or over or course.signalled is not None
        return interrupted or not parts.watching.is_steady

    lost = await parts.caching.stored(wait_s, in_vain)
    if lost:
        run.warn(f"{lost}: see `keepstep status {run.folder}`")


async def _wait_for_others(parts: Parts, outcome: Outcome) -> None:
    """Wait until the controller says that all nodes have ended; node 0 keeps it alive until then."""
    course, job = parts.course, parts.run.job
    assert course.link is not None
    if course.place is None or course.job_over.is_set():
        return
    alone = course.place.node_count == 1
    patience_s = job.linger_s if alone or outcome.kind != "finished" else _EXIT_BARRIER_S
    moves = parts.controller.seat and course.together and outcome.kind == "finished"
    away_s = _NEXT_LEADER_S if moves else _DRAIN_S if alone else job.linger_s
    gone = asyncio.ensure_future(course.link.lost(away_s))
    over = asyncio.ensure_future(course.job_over.wait())
    kill = asyncio.ensure_future(course.kill_now.wait())
    waits: list[asyncio.Future[Any]] = [gone, over, kill]
    again = [course.outcome] if outcome.kind == "finished" and course.together else []
    await asyncio.wait([*waits, *again], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
