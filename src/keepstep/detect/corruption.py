"""Tells which rank's copy of a tensor has silently turned different: by checksums of what ranks save.

Ranks that train together have parameters and optimizer states alike, because they put the same sum of gradients into
the same steps. Of that there is a proof when at three saves a parameter and all that its optimizer keeps for it (its
*family*) had the same new value on several ranks: no two of them come to the same new numbers by themselves. What is
not proven so is never judged: what stays as it is, what differs by right (statistics of a batch, averages, random
states, a rank's own data), and families of which any part ever differed before the proof.

A proven family that differs afterwards is not yet a fault: ranks may begin to train apart. Then all families differ at
once, and on all ranks; one that was damaged differs alone, since the sums of gradients stay the same for all. So one
rank is named only if all others agree, and most other families are still alike. Of two ranks that differ it is not
known which one is wrong; both are named, and only if no second family differs.

Weight decay changes a parameter alike on all ranks, too, whether or not they train it together, and where it is not
decoupled also what the optimizer keeps. In such a family it is only proven that the parameter is wrong, and only while
all that is kept for it is still alike, and moves: a gradient would have changed that first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PROOF = 3
"""At how many saves, with as many values, a family must have been alike."""
MOST_TENSORS = 1 << 18
_MOST_COUNTED = 100


class Tensor(NamedTuple):
    """A tensor of a state as far as ranks that hold copies of it have it in common.

    Attributes:
        name: path in the state: ``model.0.weight``.
        kind: data type, shape, and which shard of which whole it is.
        single: whether it is one number, as a counter of steps is, which tells nothing about gradients.
        decays: whether weight decay may change all of its family, without a gradient.
    """

    name: str
    kind: str
    single: bool = False
    decays: bool = False


Family = tuple[Tensor, ...]
"""A parameter, first, and what its optimizer keeps for it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Tensors that were alike on some ranks and are not any more.

    Attributes:
        since: the step of the first save in which they differ.
        alike: the last saved step before, in which they were alike.
        odd: the rank that differs from all others; two ranks: one of them, it is not known which.
        agreeing: the ranks that agree with each other.
        tensors: their names.
    """

    since: int
    alike: int
    odd: tuple[int, ...]
    agreeing: tuple[int, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """What one save has shown: new differences, and earlier ones, by tensor's name, that are gone."""

    differences: tuple[Difference, ...] = ()
    mended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What tensors a rank holds: their numbers in the `Comparison` that made this, in the order of its checksums."""

    ids: NDArray[np.intp]


Told = Sequence[tuple[Sequence[int], Held, "NDArray[np.uint64]"]]
"""Ranks that have the same, what they hold, and the checksums of that."""


class Comparison:
    """Compares what the ranks of a job save, one save after another."""

    def __init__(self) -> None:
        import numpy as np

        self._np = np
        self._last = (-1, -1)
        self._numbers: dict[tuple[Tensor, Tensor], int] = {}
        self._names: list[str] = []
        # By tensor's number:
        self._family = np.zeros(0, np.intp)  # number of the family's parameter
        self._driven = np.zeros(0, bool)  # whether it tells of gradients, as no counter does
        self._decays = np.zeros(0, bool)  # weight decay may change all of its family
        self._saves = np.zeros(0, np.int32)  # in how many saves in a row it was alike
        self._values = np.zeros(0, np.int32)  # how many values one after the other it had in these
        self._value = np.zeros(0, np.uint64)  # checksum in the last save in which it was alike
        self._step = np.zeros(0, np.int64)  # step of that save
        self._ranks = np.zeros(0, np.uint64)  # sum of `_mixed` over the ranks that held it at the last save
        self._private = np.zeros(
            0, bool
        )  # whether it ever differed without a proof, so that it is never judged
        self._named = np.zeros(0, bool)  # whether it has differed after a proof

    def holds(self, families: Sequence[Family]) -> Held | None:
        """What a rank holds, for `saw`; its checksums come in this order. None: that is more than can be compared."""
        np = self._np
        pairs = [(family[0], one) for family in families for one in family]
        if len(set(pairs)) < len(pairs) or len(self._names) + len(pairs) > MOST_TENSORS:
            return None
        old = len(self._names)
        for leader, one in pairs:
            if (leader, one) not in self._numbers:
                self._numbers[leader, one] = len(self._names)
                self._names.append(one.name)
        ids = np.array([self._numbers[pair] for pair in pairs], np.intp)
        self._grow(len(self._names) - old)
        for (leader, one), number in zip(pairs, ids.tolist(), strict=True):
            if number >= old:
                self._family[number] = self._numbers[leader, leader]
                self._driven[number] = leader.single or not one.single
                self._decays[number] = leader.decays
        return Held(ids)

    def saw(self, incarnation: int, step: int, told: Told) -> Compared:
        """Take one save of all ranks, newer than the last one; an older one is passed over."""
        np = self._np
        if (incarnation, step) <= self._last:
            return Compared()
        if incarnation != self._last[0]:
            self._saves[:] = self._values[:] = 0
        self._last = incarnation, step
        value, count, ranks = (
            np.zeros_like(self._value),
            np.zeros_like(self._saves),
            np.zeros_like(self._ranks),
        )
        same = np.ones_like(self._named)
        for some, held, sums in told:
            ids = held.ids
            new = count[ids] == 0
            value[ids[new]] = sums[new]
            same[ids] &= value[ids] == sums
            count[ids] += len(some)
            ranks[ids] += sum(map(_mixed, some)) & 0xFFFF_FFFF_FFFF_FFFF
        there = count > 1
        gone = ~there | (ranks != self._ranks)
        self._saves[gone] = self._values[gone] = 0
        self._ranks = ranks
        proven = self._proven()
        differ = there & ~same & ~self._named
        moved = there & same & (value != self._value)
        judged = differ & proven & (~self._decays | self._stands_alone(moved))
        differences = self._judge(judged, proven & there, told, step)
        self._private |= differ & ~self._named
        alike = there & same
        mended = alike & self._named
        self._named[mended] = False
        self._saves[mended] = self._values[mended] = 0
        self._values[alike & ((self._saves == 0) | (value != self._value))] += 1
        self._saves[alike] += 1
        for counts in (self._saves, self._values):
            np.minimum(counts, _MOST_COUNTED, out=counts)
        self._value[alike], self._step[alike] = value[alike], step
        return Compared(differences, tuple(self._names[one] for one in np.flatnonzero(mended)))

    def _grow(self, count: int) -> None:
        np = self._np
        names = (
            "family",
            "driven",
            "decays",
            "saves",
            "values",
            "value",
            "step",
            "ranks",
            "private",
            "named",
        )
        for name in names:
            old = getattr(self, f"_{name}")
            setattr(self, f"_{name}", np.concatenate([old, np.zeros(count, old.dtype)]))

    def _proven(self) -> NDArray[np.bool_]:
        """For each tensor whether its family is proven to be kept alike by the training."""
        np = self._np
        ready = ~self._private & (np.where(self._driven, self._values, self._saves) >= PROOF)
        proven = np.ones_like(ready)
        proven[self._family[~ready]] = False
        return proven[self._family]

    def _stands_alone(self, moved: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Whether it is a parameter for which something is kept, all of which ``moved`` alike."""
        np = self._np
        numbers = np.arange(len(moved))
        kept = self._driven & (self._family != numbers)
        alone = np.zeros_like(moved)
        alone[self._family[kept]] = True
        alone[self._family[kept & ~moved]] = False
        return alone & (self._family == numbers)

    def _judge(
        self, judged: NDArray[np.bool_], proven: NDArray[np.bool_], told: Told, step: int
    ) -> tuple[Difference, ...]:
        """Name ranks where that is certain, for all tensors that the same ranks hold together."""
        np = self._np
        found: list[Difference] = []
        for ranks in np.unique(self._ranks[judged]):
            ids = np.flatnonzero(judged & (self._ranks == ranks))
            held = np.flatnonzero(proven & (self._ranks == ranks))
            differing = set(self._family[ids].tolist())
            known = set(self._family[self._named].tolist())
            alike = len(set(self._family[held].tolist()) - differing - known)
            values = _values_of(ids.tolist(), told)
            odd = {_odd(one) for one in values.values()}
            who = next(iter(odd))
            if len(odd) > 1 or not who or len(differing) > (1 if len(who) > 1 else alike) or not alike:
                continue
            self._named[ids] = True
            others = tuple(sorted(rank for rank in next(iter(values.values())) if rank not in who))
            names = tuple(self._names[one] for one in ids)
            found.append(Difference(step, int(self._step[ids].min()), who, others, names))
        return tuple(found)


def _values_of(ids: Collection[int], told: Told) -> dict[int, dict[int, int]]:
    """The checksums of each of these tensors by rank."""
    found: dict[int, dict[int, int]] = {one: {} for one in ids}
    wanted = sorted(ids)
    for ranks, held, sums in told:
        numbers = held.ids.tolist()
        if wanted and not found.keys().isdisjoint(numbers):
            for number, value in zip(numbers, sums.tolist(), strict=True):
                if number in found:
                    found[number].update((rank, value) for rank in ranks)
    return found


def _odd(values: Mapping[int, int]) -> tuple[int, ...]:
    """The rank whose value differs from that of all others; of two ranks both; () when there is no such rank."""
    if len(values) == 2:
        return tuple(sorted(values))
    by_value: dict[int, list[int]] = {}
    for rank, value in values.items():
        by_value.setdefault(value, []).append(rank)
    alone, *others = sorted(by_value.values(), key=len)
    return tuple(alone) if len(alone) == 1 and len(others) == 1 else ()


def _mixed(rank: int) -> int:
    """A number of 64 bits for a rank, so that sums of them tell sets of ranks apart."""
    mixed = (rank + 1) * 0x9E37_79B9_7F4A_7C15 & 0xFFFF_FFFF_FFFF_FFFF
    mixed = (mixed ^ mixed >> 30) * 0xBF58_476D_1CE4_E5B9 & 0xFFFF_FFFF_FFFF_FFFF
    return mixed ^ mixed >> 31
