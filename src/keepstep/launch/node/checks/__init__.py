"""Error checks of a node (TRANSOM, section IV-A): before its first workers start, and beside each recovery.

Each check is a file with a function ``look(subject)`` that yields what it found, and its name is in `CHECKS`. It runs
in a thread of its own and is given up after a while: a file system that hangs must not hang the launcher.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

CHECKS = ("disk", "shared_memory", "memory", "ports", "kernel_log")
PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class Subject:
    """The node as the checks look at it."""

    node: str
    nproc: int
    folders: tuple[Path, ...] = ()  # folders that have to be writable
    port: int = 0  # port that has to be free; 0: any port will do
    since_s: float = 0.0  # CLOCK_MONOTONIC; older errors of the kernel do not count
    fresh: bool = False  # nothing has failed on this node yet


@dataclass(frozen=True, slots=True)
class Found:
    """Something that is not as it should be, in one line: what, where, and what to do."""

    text: str
    unfit: bool = False  # workers cannot run on this node as it is


def run(
    subject: Subject, names: Sequence[str] = CHECKS, *, patience_s: float = PATIENCE_S
) -> tuple[Found, ...]:
    """Run the checks side by side, for ``patience_s`` at most; returns what they found, in their order."""
    answers: queue.SimpleQueue[tuple[str, list[Found]]] = queue.SimpleQueue()

    def one(name: str) -> None:
        answers.put((name, _look(name, subject)))

    for name in names:
        threading.Thread(target=one, args=(name,), name=f"keepstep-check-{name}", daemon=True).start()
    found: dict[str, list[Found]] = {}
    until_s = time.monotonic() + patience_s
    while len(found) < len(names):
        try:
            name, lines = answers.get(timeout=max(until_s - time.monotonic(), 0.001))
        except queue.Empty:
            break
        found[name] = lines
    late = [
        Found(f"node {subject.node}: check {name} has not answered within {patience_s:g} s") for name in names
    ]
    return tuple(one for name, none in zip(names, late, strict=True) for one in found.get(name, [none]))


def _look(name: str, subject: Subject) -> list[Found]:
    look: Callable[[Subject], Iterable[Found]] = import_module(f"{__name__}.{name}").look
    try:
        return list(look(subject))
    except Exception as error:  # a check with a bug says nothing about the node
        return [Found(f"node {subject.node}: check {name} failed: {type(error).__name__}: {error}")]
