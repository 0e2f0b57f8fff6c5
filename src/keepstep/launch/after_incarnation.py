"""What follows an incarnation: a place in the next one, or the end of this node's share of the job.

Before the end, what storage is to have gets there, the others hear of it, and all processes end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from keepstep.core.budgets import Cause
from keepstep.core.exit_codes import TEMPORARY_FAILURE
from keepstep.launch.command import addresses
from keepstep.launch.command.placement import Place
from keepstep.launch.course import EndedEarly, Outcome, Parts
from keepstep.launch.signals import ROWS, TERMINATED, Ending, end_time, restart_is_vain
from keepstep.launch.termination_log import leave_message, message
from keepstep.launch.workers import incarnation, root_cause

_EXIT_BARRIER_S = 300.0
_DRAIN_S = 1.0
_FAILED_WAIT_S = 60.0
_NEXT_LEADER_S = 60.0  # most seconds until the controller's next host says that all nodes have finished


async def after(parts: Parts, follow: Callable[[], None], outcome: Outcome, place: Place) -> Place | Outcome:
    """The place in the next incarnation, or how the job ends. No worker of ``place`` runs any more.

    The controller says it where all nodes begin again together, and where it has halted the workers.
    ``follow``: carries out orders that have come before the workers had ended.
    """
    job = parts.run.job
    together = job.rendezvous.endpoint is not None and job.max_restarts > 0
    if together or (outcome.kind == "halted" and parts.course.link):
        return await after_all_nodes(parts, follow, outcome, place)
    return await _after_one_node(parts, outcome, place)


async def _after_one_node(parts: Parts, outcome: Outcome, place: Place) -> Place | Outcome:
    """A restart on this node while ``--max-restarts`` and the budgets allow one."""
    run, crew = parts.run, parts.crew
    if outcome.kind != "failed":
        return outcome
    assert crew.workers is not None
    blamed = crew.workers.blamed
    if parts.course.ended_by_scheduler(blamed.status):
        return parts.course.signal_outcome()
    if not may_follow(parts, outcome, place):
        await parts.checks.about(blamed.text)
        return _perhaps_broken(parts, _explain(parts, outcome))
    if restart_is_vain(end_time(os.environ, run.job.end_unix_s), time.time(), blamed.status):
        ended, why = _explain(parts, outcome), "the job's time is over: a restart would be in vain"
        run.warn(why)
        # The scheduler has sent the signal to the worker, and not to us.
        if blamed.status in TERMINATED:
            parts.course.ending = parts.course.ending or Ending(signal.SIGTERM, why, "time-limit")
            ended = replace(ended, code=TEMPORARY_FAILURE)
        return replace(ended, reason=f"{why}; {ended.reason}")
    if refused := crew.restarts.refused(cause_of(parts, blamed)):
        ended = _explain(parts, outcome)
        run.warn(refused.reason)
        return _perhaps_broken(parts, replace(ended, reason=refused.reason))
    wait_s = crew.restarts.pause_s
    when = f" in {wait_s:.0f} s, as storage may be mended until then" if wait_s else ""
    run.say(
        f"rank {blamed.rank}: {blamed.text}; restart {place.restarts + 1} of {run.job.max_restarts}{when}"
    )
    parts.checks.unfit()  # its warnings count; there is no other node to go to
    parts.course.renew()
    if wait_s:
        try:
            await parts.course.until(asyncio.sleep(wait_s))
        except EndedEarly as early:
            _explain(parts, outcome)
            return early.outcome
    port = run.job.master_port or addresses.free_port("127.0.0.1")
    return replace(place, incarnation=place.incarnation + 1, master_port=port)


async def after_all_nodes(
    parts: Parts, follow: Callable[[], None], outcome: Outcome, place: Place
) -> Place | Outcome:
    """The place that the controller, which re-forms all nodes together, gives this one in the next incarnation."""
    course, link = parts.course, parts.course.link
    assert link is not None
    if outcome.kind == "finished":
        course.renew()
        await _part(parts, outcome)
        if not (course.outcome.done() and course.outcome.result().kind == "halted"):
            return outcome
    elif outcome.kind not in ("failed", "halted") or course.signalled:
        # A signal that comes while workers are halted for the next incarnation ends the job all the same.
        failed = parts.crew.failures[0].status if outcome.kind == "failed" and parts.crew.failures else 0
        by_signal = outcome.kind == "halted" or course.ended_by_scheduler(failed)
        return course.signal_outcome() if by_signal else outcome
    course.renew()
    course.has_parted = False
    workers = parts.crew.workers
    # Where others have lost a rank that had left early, its node alone knows that.
    blamed = workers.blamed if workers and outcome.kind == "failed" else workers and workers.first_left
    if blamed is not None:
        tell_failed(parts, blamed)
        await parts.checks.about(blamed.text)
        if course.outcome.done() and course.outcome.result().kind == "halted":
            course.renew()  # the order to halt came meanwhile: nothing runs here any more
    link.send(link.member.kernel_told(parts.checks.kernel_told))
    link.send(link.member.halted(parts.checks.unfit(), parts.caching.rigid(place)))
    follow()
    try:
        following = await course.until(link.next_place())
    except EndedEarly as early:
        if outcome.kind == "failed":
            _explain(parts, outcome)
        return early.outcome
    if following is not None:
        return following
    why = link.stranger or f"{link.member.missing} ({parts.controller.at})"
    parts.run.warn(f"{why}: this node ends")
    failed = outcome.kind == "failed"
    ended = _explain(parts, outcome) if failed else replace(outcome, kind="failed")
    course.stop_kind = "node-lost"
    return replace(ended, code=TEMPORARY_FAILURE, reason=f"{why}; {ended.reason}")


def may_follow(parts: Parts, outcome: Outcome, place: Place) -> bool:
    """Whether another incarnation may follow that of ``place``."""
    course, most = parts.course, parts.run.job.max_restarts
    over = course.signalled or course.job_over.is_set() or place.restarts >= most
    return outcome.kind in ("failed", "halted") and not over


def tell_failed(parts: Parts, failure: root_cause.Failure) -> None:
    """Tell the controller, which counts restarts, the failure for which all nodes are to begin again."""
    link, cause = parts.course.link, cause_of(parts, failure)
    assert link is not None
    text = f"rank {cause.rank}: {cause.error}"
    link.send(
        link.member.failed(failure.exit_code, text, cause.rank, cause.step, cause.at_s, cause.by_keepstep)
    )


def tell_found(parts: Parts, failure: root_cause.Failure) -> None:
    """Tell the controller of a failure, as evidence about who is to blame; one that begins later is told then."""
    course = parts.course
    assert course.place is not None
    step = parts.crew.restarts.step_of(failure.rank, parts.watching.rings.steps(failure.rank))
    found = root_cause.finding(failure, parts.run.job.node, course.place.incarnation, step)
    if course.link:
        course.link.send(course.link.member.found(found))
    else:
        course.untold.append(found)


def cause_of(parts: Parts, failure: root_cause.Failure) -> Cause:
    """A failure as the restart budgets count it."""
    return parts.crew.restarts.cause(failure, parts.watching.rings.steps(failure.rank))


def _explain(parts: Parts, outcome: Outcome) -> Outcome:
    """Print why the job failed; returns the outcome with the exit code and words of the failure that came first."""
    workers, job = parts.crew.workers, parts.run.job
    assert workers is not None
    root = root_cause.first(workers.failures)
    blamed, report = workers.blamed, root_cause.render(job.script, job.node, workers.failures, workers.left)
    parts.run.show(report)
    if target := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        root_cause.hand_up(root, target)
    then = "" if blamed is root else f"; then rank {root.rank}: {root.text}"
    return replace(outcome, code=workers.exit_code, reason=f"rank {blamed.rank}: {blamed.text}{then}")


def _perhaps_broken(parts: Parts, outcome: Outcome) -> Outcome:
    """The job's end, which is that of a job to be started elsewhere where this node's hardware is broken."""
    if not parts.checks.is_broken:
        return outcome
    parts.checks.unfit()  # tells what the kernel said
    parts.course.stop_kind = "hardware"
    return replace(outcome, code=TEMPORARY_FAILURE)


async def say_goodbye(parts: Parts, outcome: Outcome) -> int:
    """Part from the job and end what runs beside the workers; returns the exit code."""
    run, course, controller = parts.run, parts.course, parts.controller
    if outcome.kind == "stopped" and (outcome.code or course.stopped_by_hand):
        run.say(f"the job was ended: {outcome.reason}")
    if course.leaving:
        await course.leaving
    elif not course.has_parted:
        await _part(parts, outcome)
    await controller.settled()
    controller.may_end()  # one that is ready only now is not met any more
    await parts.watching.end()
    if course.link:
        await course.link.close()
    await controller.stop()
    processes = run.processes
    ours = frozenset({processes.guard.pid}) | processes.stuck
    await incarnation.sweep(ours, processes.sessions, course.kill_now)
    parts.watching.close()
    parts.caching.close()
    code = course.stop_code if outcome.kind == "finished" and course.stop_code else outcome.code
    category = course.category_of(outcome, code)
    if controller.is_here:
        run.ended(code, outcome.reason, category, course.kind_of(outcome))
    if code:
        leave_message(run.job.termination_log, message(code, category, outcome.reason, run.folder))
    return code


async def sweep(parts: Parts) -> None:
    """End what workers have left behind, but no program of ours, and no process that waits to play a rank."""
    processes = parts.run.processes
    ours = parts.watching.pids | parts.crew.restarts.pids | processes.stuck | {processes.guard.pid}
    if parts.controller.pid:
        ours |= {parts.controller.pid}
    await incarnation.sweep(ours, processes.sessions, parts.course.kill_now)


async def leave_alone(parts: Parts, reason: str) -> None:
    """Leave a job that goes on: another launcher may have this node's place at once."""
    link = parts.course.link
    assert link is not None
    parts.course.has_parted = True
    link.send(link.member.leaves(reason))
    await link.drained(_DRAIN_S)
    await link.close()


async def _part(parts: Parts, outcome: Outcome) -> None:
    """Wait for what is on its way to storage, say that this node has ended, and wait for the other nodes."""
    course = parts.course
    course.has_parted = True
    await wait_for_storage(parts, outcome)
    until_s = time.monotonic() + parts.run.job.linger_s
    if outcome.kind == "failed" and course.place is not None and not course.signalled:
        await _until_killed(parts, [parts.controller.begun()], parts.run.job.linger_s)
    if course.link:
        course.link.send(course.link.member.ended(outcome.code, outcome.reason, course.kind_of(outcome)))
        await course.link.drained(_DRAIN_S)
        if course.place is None and not course.job_over.is_set():
            await course.link.unseated(_DRAIN_S)
        await _wait_for_others(parts, outcome, until_s)


async def wait_for_storage(parts: Parts, outcome: Outcome) -> None:
    """Keep the cache, which ends with this process, until what was to be on storage is there."""
    run, course, persisting = parts.run, parts.course, parts.run.job.persisting
    if persisting is None:
        return
    briefly_s = min(persisting.wait_s, _FAILED_WAIT_S)
    by_scheduler = course.kind_of(outcome) in ROWS and not (course.ending and course.ending.of_pod)
    wait_s = {
        "finished": persisting.wait_s,
        "failed": briefly_s,
        "alone": briefly_s,
        "stopped": briefly_s if course.stopped_by_hand or by_scheduler else 0.0,
        "signal": min(persisting.wait_s, course.ending.left_s(time.time())) if course.ending else 0.0,
    }.get(outcome.kind, 0.0)

    def in_vain() -> bool:
        over = course.job_over.is_set() and not course.stopped_by_hand
        # A scheduler that ends the job leaves time for the last step.
        told = not by_scheduler and (over or course.signalled is not None)
        interrupted = course.kill_now.is_set() or told
        # Where another run has begun, the node that would make a step whole is not in this one any more, perhaps, and
        # the other run waits for this node.
        succeeded = course.link is not None and bool(course.link.stranger)
        return interrupted or succeeded or not parts.watching.is_steady

    alone = course.place is not None and course.place.node_count == 1
    # Nodes of a job that failed may have different newest steps, none of which would become whole. Those of one that
    # the scheduler ends are at most one step apart, as they were told at once: the newest two have one that all have.
    whole = outcome.kind == "finished" or (alone and (outcome.kind == "failed" or by_scheduler))
    last = 1 if whole else 2 if by_scheduler else 0
    lost = await parts.caching.stored(wait_s, in_vain, last=last)
    if lost:
        run.warn(f"{lost}: see `keepstep status {run.folder}`")


async def _wait_for_others(parts: Parts, outcome: Outcome, until_s: float) -> None:
    """Wait until the controller says that all nodes have ended; node 0 keeps it alive until then.

    ``until_s``: by ``time.monotonic()``, until when a controller that has never been met may begin.
    """
    course, job = parts.course, parts.run.job
    assert course.link is not None
    if course.place is None or course.job_over.is_set():
        return
    alone = course.place.node_count == 1
    patience_s = job.linger_s if alone or outcome.kind != "finished" else _EXIT_BARRIER_S
    moves = parts.controller.seat and course.together and outcome.kind == "finished"
    # The controller, which writes down why a job failed, may be slow to begin.
    is_lost = course.link.has_met or bool(course.link.stranger) or parts.controller.has_given_up
    late_s = 0.0 if outcome.kind != "failed" or is_lost else until_s - time.monotonic()
    away_s = _NEXT_LEADER_S if moves else max(_DRAIN_S, late_s) if alone else job.linger_s
    again = [course.outcome] if outcome.kind == "finished" and course.together else []
    await _until_killed(parts, [course.link.lost(away_s), course.job_over.wait()], patience_s, *again)


async def _until_killed(
    parts: Parts, ends: Sequence[Coroutine[Any, Any, Any]], patience_s: float, *also: asyncio.Future[Any]
) -> None:
    """Wait for the first of these, for ``patience_s`` at most, and not for an operator who is impatient."""
    waits = [asyncio.ensure_future(one) for one in (*ends, parts.course.kill_now.wait())]
    await asyncio.wait([*waits, *also], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
