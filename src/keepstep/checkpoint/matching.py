"""Whether the ranks' saves match: which snapshots every rank has sealed, and where all ranks are in the same save.

All of it goes through the store of the default process group, by counting. Nothing here is a collective of the script's
groups, so a rank that does not come, or comes with another step, is missed instead of being waited for in an exchange
that others never enter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from keepstep.checkpoint.memory.slots import Key
from keepstep.core.ranges import fold_ranks

_COUNT_BITS = 31
_MOST_TOLD = 256  # ranks that are looked at to say who does not save
_POLL_S, _LONGEST_POLL_S = 0.0005, 0.01
_GO, _OFF = "go", "off"


class Store(Protocol):
    """What is used of torch's stores."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def delete_key(self, key: str, /) -> bool: ...


class Moment(NamedTuple):
    """When a rank saved, in numbers that are the same on all ranks at the same point of the script.

    Attributes:
        number: which save of its incarnation this is, from 1; 0: not known.
        collectives: how many collectives of the default group the rank had begun; 0 where they do not tell saves apart.
    """

    number: int = 0
    collectives: int = 0

    def pack(self) -> int:
        """The moment as a number below 2**62."""
        return (self.number % (1 << _COUNT_BITS)) << _COUNT_BITS | self.collectives % (1 << _COUNT_BITS)

    @classmethod
    def unpack(cls, number: int) -> Moment:
        """The moment that `pack` turned into ``number``."""
        return cls(number >> _COUNT_BITS & (1 << _COUNT_BITS) - 1, number & (1 << _COUNT_BITS) - 1)


def same_moment(moments: Iterable[int]) -> bool:
    """Whether packed moments of several ranks are one: the same save by number, or after the same collectives.

    A rank that leaves out a save numbers later ones differently. One that numbers its steps differently does not reach
    the same step after the same collectives. Moments that are not known (0) are left out.
    """
    known = {Moment.unpack(one) for one in moments if one}
    collectives = {one.collectives for one in known}
    return len({one.number for one in known}) <= 1 or (len(collectives) == 1 and collectives != {0})


class Matches:
    """What one rank learns of the others' saves, in one incarnation of the job.

    A store that fails, because the process that has it died, tells nothing: the training is about to fail by itself.
    """

    def __init__(
        self, store: Callable[[], Store | None], rank: int, world_size: int, incarnation: int
    ) -> None:
        """``store``: returns the store that all ranks share, None while there is none; a lone rank needs none."""
        self._find, self._rank, self._world_size = store, rank, world_size
        self._prefix = f"keepstep/saves/{incarnation}/"
        self._sealed: dict[Key, tuple[Moment, int]] = {}  # what this rank has told, newest last
        self._whole: set[Key] = set()
        self._alike: set[Key] = set()
        self._told_to: Store | None = None
        self._left: set[Key] = set()  # what this rank has left out itself
        self._concluded: list[str] = []  # keys of the last snapshot that this rank knew to be whole first
        self._late: str = ""  # the meeting that failed last
        self._steps: dict[int, int] = {}  # by number, this rank's last saves

    def agreed(self, key: Key | None) -> None:
        """All ranks go on from ``key``, so it is whole."""
        self._whole.update([key] if key else [])

    @property
    def possible(self) -> bool:
        """Whether this rank can learn of others at all: there is a store, or no other rank."""
        return self._world_size == 1 or self._store() is not None

    def claim(self, topic: str) -> bool:
        """Whether no other rank has claimed ``topic`` since the store was made; True where that is not known."""
        if (store := self._store()) is None:
            return True
        mine = str(self._rank)
        return _try(lambda: store.compare_set(f"keepstep/said/{topic}", "", mine)) in (None, mine.encode())

    def begins(self, step: int, number: int) -> None:
        """This rank's save with this number is of ``step``."""
        self._steps[number] = step
        self._steps.pop(number - 4, None)
        if (store := self._store()) is not None:
            _try(lambda: store.set(f"{self._prefix}last/{self._rank}", f"{number} {step}"))

    def sealed(self, key: Key, moment: Moment, digest: int = 0) -> None:
        """This rank has sealed ``key``. With a ``digest`` it is found out whether all ranks have the same state."""
        store = self._store()  # comes first: a store that is new is told of what was sealed before
        self._sealed[key] = moment, digest
        for old in list(self._sealed)[:-8]:
            del self._sealed[old]
        if self._world_size == 1:
            self._whole = {*sorted(self._whole)[-8:], key}
            self._alike = {key} if digest else set()
        elif store is not None:
            _try(lambda: self._tell(store, key))

    def is_whole(self, key: Key) -> bool:
        """Whether every rank has sealed ``key`` at the same moment."""
        return self._has(key, "whole", self._whole)

    def is_alike(self, key: Key) -> bool:
        """Whether every rank has sealed ``key`` with the same digest; known once it is whole."""
        return self._has(key, "alike", self._alike)

    def left_out(self, key: Key) -> None:
        """This rank will not have ``key``, so that others need not keep it."""
        self._left = {*sorted(self._left)[-8:], key}
        if (store := self._store()) is not None:
            _try(lambda: store.set(f"{self._name(key)}left", "1"))

    def is_dead(self, key: Key) -> bool:
        """Whether ``key`` never becomes whole: some rank has left it out, or all have begun a later save."""
        store = self._store()
        if key in self._left or store is None:
            return key in self._left
        if _try(lambda: store.check([f"{self._name(key)}left"])):
            return True
        # A rank tells what it has sealed before it begins its next save, so this is looked at first.
        passed = self._world_size <= _MOST_TOLD and all(
            (found := self._last(store, rank)) is not None and found[1] > key.step
            for rank in range(self._world_size)
        )
        return passed and not self.is_whole(key)

    def meet(self, name: str, patience_s: Callable[[bool], float]) -> bool:
        """Whether all ranks are here now, and so can exchange something. All get the same answer.

        ``patience_s`` tells how long to wait for the others, given whether all came to the last meeting that failed,
        only too late. When nobody else came there, this one is not waited for at all.
        """
        store = self._store()
        if self._world_size == 1 or store is None:
            return True
        where, found = f"{self._prefix}meet/{name}/", None
        deadline_s = time.monotonic() + self._meeting_s(store, patience_s)
        if _try(lambda: store.add(f"{where}n", 1)) == self._world_size:
            found = _try(lambda: store.compare_set(f"{where}is", "", _GO))
        else:
            _poll(lambda: bool(_try(lambda: store.check([f"{where}is"]))), deadline_s)
            found = _try(lambda: store.compare_set(f"{where}is", "", _OFF))
        met = found == _GO.encode()
        self._late = "" if met else f"{where}n"
        return met

    def _meeting_s(self, store: Store, patience_s: Callable[[bool], float]) -> float:
        late = self._late
        if not late:
            return patience_s(False)
        return patience_s(True) if _try(lambda: store.add(late, 0)) == self._world_size else 0.0

    def objection(self, missed: bool) -> str:
        """How others save otherwise than this rank; "": that is not known.

        ``missed``: whether a rank that has saved nothing yet should have: all have met since, or it was waited for.
        """
        store = self._store()
        if store is None:
            return ""
        never: list[int] = []
        for rank in range(min(self._world_size, _MOST_TOLD)):
            last = self._last(store, rank)
            if last is None:
                never.append(rank)
                continue
            number, step = last
            own = self._steps.get(number, step)
            if own != step:
                return (
                    f"save number {number} is step {own} on rank {self._rank} and step {step} on rank {rank}: "
                    "give save() the same step on all ranks"
                )
        if self._last(store, self._rank) is None:
            return ""  # the store answers no more
        if never and missed:
            who = f"{'rank' if len(never) == 1 else 'ranks'} {fold_ranks(never)}"
            return f"{who} never saved: call save() on all ranks, not only on rank {self._rank}"
        return ""

    def _last(self, store: Store, rank: int) -> tuple[int, int] | None:
        """Number and step of the last save that a rank has begun; None where it has begun none."""
        name = f"{self._prefix}last/{rank}"
        words = (_try(lambda: store.get(name)) or b"").split() if _try(lambda: store.check([name])) else []
        return (int(words[0]), int(words[1])) if len(words) == 2 else None

    def _tell(self, store: Store, key: Key) -> None:
        moment, digest = self._sealed[key]
        name = self._name(key)
        # The digest comes first, so that whoever sees a whole snapshot knows whether all ranks have it alike.
        if digest and store.add(f"{name}d{digest}", 1) == self._world_size:
            store.set(f"{name}alike", "1")
        counters = [f"{name}n{moment.number}"]
        counters += [f"{name}c{moment.collectives}"] if moment.collectives else []
        counts = [store.add(counter, 1) for counter in counters]
        if self._world_size in counts:
            store.set(f"{name}whole", "1")
            for old in self._concluded:  # nobody asks for these any more, as all ranks hold a newer one
                store.delete_key(old)
            self._concluded = [*counters, f"{name}d{digest}", f"{name}alike", f"{name}whole"]

    def _has(self, key: Key, word: str, known: set[Key]) -> bool:
        if key in known:
            return True
        store = self._store()
        if store is None or not _try(lambda: store.check([f"{self._name(key)}{word}"])):
            return False
        known.add(key)
        for old in sorted(known)[:-8]:
            known.discard(old)
        return True

    def _name(self, key: Key) -> str:
        return f"{self._prefix}{key.pack()}/"

    def _store(self) -> Store | None:
        store = self._find() if self._world_size > 1 else None
        if store is not None and store is not self._told_to:
            self._told_to = store  # a group that was made again has another store, which knows nothing
            self._concluded = []
            for key in self._sealed:
                _try(lambda key=key: self._tell(store, key))
        return store


def _poll(holds: Callable[[], bool], deadline_s: float) -> bool:
    pause_s = _POLL_S
    while not holds():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(min(pause_s, max(0.0, deadline_s - time.monotonic())))
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)
    return True


def _try(call: Callable[[], Any]) -> Any:
    """What a call to a store gives; None where it failed, as torch has it: with a RuntimeError of some kind."""
    try:
        return call()
    except (RuntimeError, OSError):
        return None


def newest_whole(keys: Sequence[Key | None], matches: Matches) -> Key | None:
    """The newest of these snapshots that every rank has sealed."""
    return next((key for key in sorted(filter(None, keys), reverse=True) if matches.is_whole(key)), None)
