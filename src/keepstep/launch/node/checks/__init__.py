"""Error checks of a node (TRANSOM, section IV-A): before its first workers start, and beside each recovery.

One file each, with a function ``look(subject)`` that yields what it found; add its name to `CHECKS`. Each runs in a
thread of its own and is given up after a while: a file system that hangs must not hang the launcher.
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
    """What is looked at."""

    node: str
    nproc: int
    folders: tuple[Path, ...] = ()  # that have to be writable
    port: int = 0  # that has to be free; 0: any is
    since_s: float = 0.0  # CLOCK_MONOTONIC from which on the kernel's errors count
    fresh: bool = False  # nothing has failed here yet


@dataclass(frozen=True, slots=True)
class Found:
    """Something that is not as it should be, in one line: what, where, and what to do."""

    text: str
    unfit: bool = False  # workers cannot run on this node as it is


def run(
    subject: Subject, names: Sequence[str] = CHECKS, *, patience_s: float = PATIENCE_S
) -> tuple[Found, ...]:
    """Run the checks side by side; what they found, in their order, within ``patience_s``."""
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
    except Exception as error:  # a check that fails says nothing about the node
        return [Found(f"node {subject.node}: check {name} failed: {type(error).__name__}: {error}")]
