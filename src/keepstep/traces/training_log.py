"""Training logs of Megatron-LM, NeMo, torchtitan, DeepSpeed, Lightning and others: times of iterations, by run.

A job that began anew, and wrote on into the same log, has several runs. What ranks tell of themselves is kept, too:
their own times, and how far their NCCL watchdogs say they were when operations timed out.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.errors import TraceError
from keepstep.traces.log_formats import SPEEDS, reading
from keepstep.traces.log_runs import MARKS, MOST_READINGS, LoggedRun, LogRuns
from keepstep.traces.log_text import plain_text, text_lines
from keepstep.traces.watchdog import WatchdogWords

_HEAD_BYTES = 16 << 20  # of a file that are searched to recognise a log
EXPECTED = (
    "'iteration N/M | … elapsed time per iteration (ms): T' of Megatron-LM, 'train_step_timing in s' of NeMo, "
    "'step: N … tps: T' of torchtitan, 'global_step=N, … CurrSamplesPerSec=S' of DeepSpeed, a progress bar with 'it/s' "
    "(Lightning), or a timeout of NCCL's watchdog"
)
"""The lines that are known, in words."""


@dataclass(frozen=True, slots=True)
class TrainingLog:
    """The runs in a log in their order, and what could not be used.

    Attributes:
        speed: what the log counts a second (``tokens``, ``samples``); empty where it has times.
        world_size: the number of ranks as the log says it; 0 where it does not.
    """

    runs: tuple[LoggedRun, ...]
    speed: str = ""
    world_size: int = 0
    missing: tuple[str, ...] = ()


def looks_like_training_log(path: Path) -> bool:
    """Whether an iteration, or a watchdog's timeout, is in the first or last 16 MiB of a file, plain or gzipped."""
    with contextlib.suppress(OSError, EOFError):
        return _tells(text_lines(path)) or _tells(text_lines(path, max(path.stat().st_size - _HEAD_BYTES, 0)))
    return False


def _tells(lines: Iterable[bytes]) -> bool:
    """Whether an iteration or a timeout is in the first 16 MiB of lines."""
    left = _HEAD_BYTES
    for line in lines:
        if any(mark in line for mark in MARKS):
            text = plain_text(line)
            if reading(text) is not None or WatchdogWords().take(text):
                return True
        left -= len(line) + 1
        if left < 0:
            break
    return False


def read_training_log(path: Path) -> TrainingLog:
    """Read a log, plain or gzipped.

    Raises:
        TraceError: the file cannot be read, or has neither an iteration nor a timeout in it.
    """
    log = LogRuns()
    missing: list[str] = []
    try:
        for line in text_lines(path):
            log.take(line)
            if log.room == 0:
                break
    except (OSError, EOFError) as error:
        if log.empty:
            raise TraceError(f"{path}: cannot be read: {error}") from error
        missing.append(f"{path.name}: ends early ({error})")
    if log.empty:
        raise TraceError(f"{path}: has no line that tells of an iteration; known are {EXPECTED}")
    chosen, runs = log.runs()
    if log.room == 0:
        missing.append(f"{path.name}: only its first {MOST_READINGS} lines of iterations are used; split it")
    if len(runs) > 1:
        what = "its bar" if chosen == "progress bar" else "the job"
        missing.append(
            f"{path.name}: {what} began anew {len(runs) - 1} times; its {len(runs)} runs are judged each"
        )
    holes = sum(_holes([one.number for one in run.iterations]) for run in runs)
    if holes and chosen != "progress bar":
        missing.append(f"{path.name}: {holes} gaps between iterations")
    return TrainingLog(tuple(runs), SPEEDS.get(chosen, "") if chosen else "", log.world, tuple(missing))


def _holes(numbers: list[int]) -> int:
    """How often the distance between iterations differs from the usual one: a log may hold every n-th only."""
    steps = [second - first for first, second in itertools.pairwise(numbers)]
    usual = max(set(steps), key=steps.count, default=1) if len(set(steps)) < 64 else 1
    return sum(step != usual for step in steps)
