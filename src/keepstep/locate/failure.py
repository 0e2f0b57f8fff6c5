"""Why a job failed, and who caused it, from what its ranks, its nodes' kernels and its launchers said.

Who spoke first of a cause of its own is the cause; who only tells of others follows. Where all ranks met one error of
their own it is the program, and nobody is named; where only consequences are told the cause is unknown, and so it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from keepstep.core.told import FEW_STEPS, Failure, Row, Told, Words
from keepstep.locate.culprits_in_words import blamed_in_words, waited_for_in_words

# So many times a job has to go on after an error before that is usual, if it comes no more often than so many times
# as before.
_OFTEN, _BURST = 3, 2
# A fault that is usually the program's is the GPU's where so many processes met it, all on one GPU.
_FAULTS_OF_ONE_GPU = 3
_GPU_FAULTY = "gpu-faulty"
_PROGRAMS_FAULTS = frozenset({"gpu-memory-fault", "illegal-instruction", "illegal-access"})
# Errors that programs handle as a matter of course: what is raised while one is handled has told the cause.
_HANDLED = frozenset({"handled"})
# Echoes that only tell that processes ended.
_ENDS = frozenset({"exit-any", "torch-child-failed"})

HEALTHY = Failure("", "", "nothing failed")


def explain(logs: Sequence[Words]) -> Failure:
    """The failure that the words of one or more logs of one job tell; `HEALTHY` where they tell of none."""
    told = _in_order([one for words in logs for one in _of_the_end(words)])
    heard = frozenset(rank for words in logs for rank in words.heard)
    if not _has_failed(told, heard, sum(words.progress for words in logs)):
        return HEALTHY
    root = _root(told)
    if root is None:
        return _unknown(told)
    row = _of_many(root, told)
    blamed = blamed_in_words(root, row, told, heard)
    then = tuple(
        one for one in told if one is not root and one.row.role in ("cause", "suspect", "exception", "note")
    )
    followers = tuple(
        one for one in told if one.row.role in ("echo", "timeout", "outcome") and one is not root
    )
    missing = [blamed.missing] if blamed.missing else []
    if root.row.role == "outcome":
        missing.append("the words of that process: they would tell why it ended so")
    return Failure(
        row.cause_class, row.kind, row.title, root, blamed.culprits, blamed.confidence, row.advice, then, followers,
        tuple(missing),
    )  # fmt: skip


def _of_the_end(words: Words) -> tuple[Told, ...]:
    """What was told at the end of a log, where that has an error of its own; else all that is not usual for the job.

    After TRANSOM (§IV-B): the errors in a window count against their own usual rate. The window is the job's: lines
    between which each rank makes at most five steps.
    """
    enough = FEW_STEPS * max(1, len(words.heard))
    usual = _usual(words.told, enough)
    left = tuple(one for one in words.told if one.row.name not in usual)
    last = tuple(one for one in left if one.went_on <= enough)
    own = any(one.row.role in ("cause", "suspect", "exception") and not one.warned for one in last)
    return last if own else left


def _usual(told: Sequence[Told], enough: int) -> set[str]:
    """The rows whose errors the job survives again and again, and that came no more often now."""
    found: set[str] = set()
    for name in {one.row.name for one in told if one.survived or one.went_on > enough}:
        lines = [one for one in told if one.row.name == name]
        # Lines of several ranks at one moment are one time.
        over = sorted(one.went_on for one in lines if one.went_on > enough)
        moments = sum(at == 0 or went_on - over[at - 1] > enough for at, went_on in enumerate(over))
        times = max(moments, *(one.survived + (one.went_on > enough) for one in lines))
        now = sum(one.recent for one in lines if one.went_on <= enough)
        before = sum(one.count for one in lines) - now
        if times >= _OFTEN and now * times <= _BURST * before:
            found.add(name)
    return found


def _in_order(told: Iterable[Told]) -> list[Told]:
    """By time where all lines of all logs have one; else log after log."""
    every = list(told)
    if len({one.source for one in every}) > 1 and all(one.time_s is not None for one in every):
        return sorted(every, key=lambda one: (one.time_s or 0.0, one.source, one.number))
    return sorted(every, key=lambda one: (one.source, one.number)) if every else every


def _has_failed(told: Sequence[Told], heard: frozenset[int], progress: int) -> bool:
    """Whether anything failed: warnings are no failure, nor is an error after which the job went on.

    Who warns of a lost connection at the end of a job that worked may only have ended later than others.
    """
    telling = [one for one in told if one.row.role != "note"]
    ended = [one for one in telling if one.row.role in ("outcome", "echo", "timeout")]
    ended = [one for one in ended if not one.warned or (progress == 0 and one.row.role != "outcome")]
    if ended:
        return True
    enough = FEW_STEPS * max(1, len(heard))
    return any(_fails(one, enough) for one in telling)


def _fails(one: Told, enough: int) -> bool:
    """Whether a line alone says that something failed, if the job made ``enough`` progress afterwards or not."""
    if one.row.role == "cause" and one.row.cause_class != "user":
        return True
    return not one.warned and (one.row.role == "cause" or one.went_on <= enough)


def _root(told: Sequence[Told]) -> Told | None:
    """The line that tells the cause."""
    causes = [one for one in told if one.row.role == "cause"]
    if causes:
        first = causes[0]
        block = [one for one in causes if (one.source, one.block) == (first.source, first.block)]
        best = min(block, key=lambda one: one.row.general)
        if best.row.blames == "gpu":  # the driver says the same in several lines
            best = next(one for one in block if (one.row.blames, one.row.kind) == ("gpu", best.row.kind))
        return _first_of_its_gpu(_what_it_wraps(best, told), told)
    own = [one for one in told if one.row.role in ("suspect", "exception") and not one.warned]
    own = [one for one in own if not _was_killed(one, told)]
    if own:
        return _telling(own)
    warned = [one for one in told if one.row.role == "suspect"]
    if warned:
        return warned[0]
    # A mere code tells of no cause where others tell of consequences: it may be one, too.
    followed = any(one.row.role in ("echo", "timeout") and one.row.name not in _ENDS for one in told)
    ended = (one for one in told if one.row.role == "outcome")
    return next((one for one in ended if one.row.kind != "exit-code" or not followed), None)


def _what_it_wraps(cause: Told, told: Sequence[Told]) -> Told:
    """What a client of a store raised first, where the cause is the general error in which that was passed on."""
    if not cause.row.general:
        return cause
    return next(
        (
            one
            for one in told[: told.index(cause)]
            if (one.source, one.block) == (cause.source, cause.block)
            and one.row.role == "suspect"
            and one.row.cause_class == cause.row.cause_class
            and one.row.general <= cause.row.general
        ),
        cause,
    )


def _was_killed(error: Told, told: Sequence[Told]) -> bool:
    """Whether an error was printed without a traceback by a process that then was killed from outside."""
    if error.row.role != "exception" or error.begins or error.speaker.rank is None:
        return False
    return any(
        one.row.kind == "sigkill" and one.speaker.rank == error.speaker.rank and one.number > error.number
        for one in told
    )


def _first_of_its_gpu(cause: Told, told: Sequence[Told]) -> Told:
    """The driver's first error of the GPU that a cause is about: what it says later follows."""
    pci = cause.places.get("pci")
    before = told[: told.index(cause)] if pci else ()
    return next((one for one in before if one.places.get("pci") == pci and one.row.role == "suspect"), cause)


def _telling(own: Sequence[Told]) -> Told:
    """Of errors that no row calls a cause, the one that tells why: the first, or what its block knows better."""
    first = own[0]
    block = [one for one in own if (one.source, one.block) == (first.source, first.block)]
    suspects = [one for one in block if one.row.role == "suspect"]
    if suspects:
        return min(suspects, key=lambda one: one.row.general)
    return next((one for one in block if one.row.kind not in _HANDLED), block[-1])


def _of_many(root: Told, told: Sequence[Told]) -> Row:
    """The row of the root; a fault that is the program's, but meets many processes on one GPU, is the GPU's."""
    if root.row.kind not in _PROGRAMS_FAULTS or "pci" not in root.places:
        return root.row
    faults = [one for one in told if one.row.kind in _PROGRAMS_FAULTS and "pci" in one.places]
    pids = {one.places.get("pid", "") for one in faults} - {""}
    gpus = {one.places["pci"] for one in faults}
    if len(gpus) > 1 or len(pids) < _FAULTS_OF_ONE_GPU:
        return root.row
    title = f"one GPU faults again and again, under {len(pids)} processes"
    advice = "take the GPU out and test it: the program faults on no other"
    return replace(root.row, cause_class="node", kind=_GPU_FAULTY, title=title, advice=advice)


def _unknown(told: Sequence[Told]) -> Failure:
    """What is said where only consequences are told."""
    lost_patience = any(one.row.role == "timeout" for one in told)
    kind = "timeout-only" if lost_patience else "echo-only"
    silent = "the words of a rank that wrote nothing here, and the kernel logs of the nodes"
    followers = tuple(one for one in told if one.row.role in ("echo", "timeout", "outcome"))
    title = "cause unknown: only consequences are told"
    missed = waited_for_in_words(told)
    return Failure("other", kind, title, None, missed, "low", "", (), followers, (silent,))
