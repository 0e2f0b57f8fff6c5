"""Plans what to write to storage next, without I/O.

The steps that are wanted on storage are declared as a set. A step that is wanted, sealed in the node's cache and not on
storage yet is written, tried again for as long as it is wanted, and pinned in the cache meanwhile. The oldest step
comes first. A later save never replaces a wanted step; only a declaration without that step gives it up.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.storage.manifest import key_text


@dataclass(frozen=True, slots=True)
class WriteShard:
    """Write a rank's part of a step, read it back and compare."""

    key: Key
    rank: int


@dataclass(frozen=True, slots=True)
class Conclude:
    """Check whether all parts of a step are there; then the leader writes the manifest, other nodes wait for it."""

    key: Key


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a step that is wanted no longer; its manifest goes first."""

    key: Key


Task = WriteShard | Conclude | Remove


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays between tries: doubled from the first to the longest, each shortened at random by up to half.

    ``longest_wait_s`` is the longest delay between two checks for other nodes' parts.
    """

    first_s: float = 1.0
    longest_s: float = 120.0
    longest_wait_s: float = 15.0

    def delay_s(self, failures: int, chance: float) -> float:
        """The delay after the ``failures``-th failure in a row; ``chance`` is a random number from 0 to 1."""
        return min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 60)) * (0.5 + 0.5 * chance)


@dataclass(slots=True)
class _Tries:
    failures: int = 0
    waits: int = 0
    not_before_s: float = 0.0
    error: str = ""


class PersistPlan:
    """The plan of one node. Times are seconds of any steady clock.

    ``leader``: whether this node writes manifests and removes steps; true for one node of the job.
    ``seed``: of the random numbers that shorten delays.
    """

    def __init__(
        self, ranks: Iterable[int], *, leader: bool, backoff: Backoff | None = None, seed: int = 0
    ) -> None:
        self.ranks = tuple(sorted(set(ranks)))
        self.leader = leader
        self._backoff = backoff or Backoff()
        self._chance = random.Random(seed)
        self._wanted: set[Key] = set()
        self._remove_others = False
        self.cached: frozenset[tuple[Key, int]] = frozenset()
        """Step and rank of all parts that are whole in the node's cache; whoever sees the cache sets them."""
        self._written: set[tuple[Key, int]] = set()
        self._stored: dict[Key, bool] = {}
        self._tries: dict[Task, _Tries] = {}
        self._flying: set[Task] = set()

    def want(self, keys: Iterable[Key], *, remove_others: bool = False) -> None:
        """Declare all steps that are to be on storage, in place of those declared before.

        ``remove_others``: whether to remove all other steps, once a newer wanted one is whole on storage.
        """
        self._wanted = set(keys)
        self._remove_others = remove_others
        self._tries = {
            task: tries
            for task, tries in self._tries.items()
            if isinstance(task, Remove) or task.key in self._wanted
        }

    def listed(self, stored: Mapping[Key, bool]) -> None:
        """Note all steps found on storage, with True for those that are whole."""
        self._stored = dict(stored)

    def next(self, now_s: float) -> Task | None:
        """The task to begin now, in flight until ``done``, ``failed`` or ``waits``; None when none is due."""
        for task in self._due():
            if task not in self._flying and self._not_before_s(task) <= now_s:
                self._flying.add(task)
                return task
        return None

    def wake_s(self) -> float | None:
        """The time at which the next task that is not in flight is due; None when there is no such task."""
        return min(
            (self._not_before_s(task) for task in self._due() if task not in self._flying), default=None
        )

    def done(self, task: Task) -> None:
        """Note that a task was carried out."""
        self._flying.discard(task)
        self._tries.pop(task, None)
        if isinstance(task, WriteShard):
            self._written.add((task.key, task.rank))
        elif isinstance(task, Conclude):
            self._stored[task.key] = True
        else:
            self._stored.pop(task.key, None)

    def failed(self, task: Task, error: str, now_s: float) -> None:
        """Note that a task failed; it is tried again later."""
        self._flying.discard(task)
        tries = self._tries.setdefault(task, _Tries())
        tries.failures += 1
        tries.error = error
        tries.not_before_s = now_s + self._backoff.delay_s(tries.failures, self._chance.random())

    def waits(self, task: Conclude, now_s: float) -> None:
        """Note that other nodes' parts of the step are not on storage yet; this is no failure, and checked later."""
        self._flying.discard(task)
        tries = self._tries.setdefault(task, _Tries())
        tries.failures, tries.waits = 0, tries.waits + 1
        tries.not_before_s = now_s + min(
            self._backoff.delay_s(tries.waits, 1.0), self._backoff.longest_wait_s
        )

    def again(self, key: Key, rank: int) -> None:
        """Have a part written again, because it is not on storage as it was written."""
        self._written.discard((key, rank))

    @property
    def pinned(self) -> frozenset[Key]:
        """Steps that must stay in the node's cache, because they are wanted and not whole on storage."""
        return frozenset(
            key for key, _ in self.cached if key in self._wanted and not self._stored.get(key, False)
        )

    @property
    def whole(self) -> frozenset[Key]:
        """All steps that are whole on storage, wanted or not."""
        return frozenset(key for key, whole in self._stored.items() if whole)

    def lasting(self, tries: int) -> tuple[Task, str] | None:
        """The task for the oldest wanted step that has failed so often in a row, and why; None without one."""
        found = [(task, one) for task, one in self._tries.items() if one.failures >= tries]
        return min(((task, one.error) for task, one in found), key=lambda one: one[0].key, default=None)

    def troubles(self, now_s: float) -> list[str]:
        """A line for each thing that keeps a wanted step from storage; oldest step first."""
        lines: list[str] = []
        for task in sorted(self._tries, key=lambda one: one.key):
            tries = self._tries[task]
            if tries.failures:
                what = f"rank {task.rank}'s part" if isinstance(task, WriteShard) else "its manifest"
                verb = "cannot be removed" if isinstance(task, Remove) else f"{what} is not on storage"
                lines.append(
                    f"{key_text(task.key)}: {verb} after {tries.failures} tries: {tries.error}; "
                    f"next try in {max(tries.not_before_s - now_s, 0.0):.0f} s"
                )
        for key in sorted(self._wanted):
            if self._stored.get(key, False):
                continue
            lost = [r for r in self.ranks if (key, r) not in self.cached and (key, r) not in self._written]
            if lost:
                lines.append(
                    f"{key_text(key)}: wanted on storage, but not in the cache of ranks {', '.join(map(str, lost))}"
                )
        return lines

    def _due(self) -> Iterable[Task]:
        open_steps = sorted(key for key in self._wanted if not self._stored.get(key, False))
        for key in open_steps:
            for rank in self.ranks:
                if (key, rank) in self.cached and (key, rank) not in self._written:
                    yield WriteShard(key, rank)
        for key in open_steps:
            if all((key, rank) in self._written for rank in self.ranks):
                yield Conclude(key)
        if self.leader and self._remove_others:
            whole = [key for key in self._wanted if self._stored.get(key, False)]
            newest = max(whole, default=None)
            for key in sorted(self._stored):
                if newest is not None and key not in self._wanted and key < newest:
                    yield Remove(key)

    def _not_before_s(self, task: Task) -> float:
        tries = self._tries.get(task)
        return tries.not_before_s if tries else 0.0
