"""How the ranks of a job agree on where to go on from, over all sources. No I/O and no torch: rows in, rows out.

Each rank runs `resume` or `begin`, generators that give a row of numbers and get the rows of all ranks, by rank. All
branch on the rows only, so all make the same exchanges and end alike.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from keepstep.checkpoint.memory.slot import SLOTS_PER_RANK
from keepstep.checkpoint.memory.slots import Key, agree
from keepstep.core.errors import CheckpointError
from keepstep.core.ranges import fold_ranks

WIDTH = 4 + 3 * SLOTS_PER_RANK
"""Numbers in a row."""

Row = list[int]
Rows = list[Row]


class Copied(IntEnum):
    """What became of a rank's part."""

    WELL = 0
    DAMAGED = 1
    IMPOSSIBLE = 2  # the state has another structure


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What a rank can have from outside its node's cache.

    Attributes:
        keys: what some source has.
        incarnation: the highest of anything there; -1: nothing.
        refused: why something that is there cannot be had.
        troubles: why nothing can be told of a source that must be heard.
        unsure: some source was not heard.
    """

    keys: frozenset[Key] = frozenset()
    incarnation: int = -1
    refused: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()
    unsure: bool = False


class Rank(Protocol):
    """A rank's own cache and its way to other sources."""

    def own(self) -> frozenset[Key]:
        """What its cache has sealed."""
        ...

    def begun(self) -> bool:
        """Whether its cache has nothing, or no more than the first snapshot of a training, and that undamaged."""
        ...

    def elsewhere(self) -> Elsewhere:
        """What can be had from elsewhere."""
        ...

    def bring(self, key: Key) -> None:
        """Have a state of elsewhere in the own cache. Raises CheckpointError."""
        ...

    def copy(self, key: Key) -> Copied:
        """Bring the bytes of a state in the own cache into the live state."""
        ...

    def drop(self, key: Key) -> None:
        """What the own cache has of it is damaged."""
        ...

    def wanted(self, key: Key) -> bool:
        """Whether it is to be brought to storage."""
        ...

    def digest(self, key: Key) -> int:
        """Of what the own cache has of it, to be compared with other ranks'; 0: nobody wants to know."""
        ...


@dataclass(frozen=True, slots=True)
class Agreed:
    """Where all ranks go on.

    Attributes:
        key: the state; None: there was none.
        incarnation: of what is saved from here on, above that of anything that is kept anywhere.
        pending: older states that every rank holds: those of them that wait for storage are to be kept.
        wanted: whether the state itself waits for storage.
        moved: ranks that did not have it in their node's cache.
        alike: it is known to be the very same on all ranks.
        given_up: why states of the caches are not kept; "" when there are none.
    """

    key: Key | None
    incarnation: int
    pending: frozenset[Key] = frozenset()
    wanted: bool = False
    moved: tuple[int, ...] = ()
    alike: bool = False
    given_up: str = ""


def keys_of(row: Row) -> frozenset[Key]:
    """The keys in a row."""
    return frozenset(key for key in map(Key.unpack, row[4:]) if key is not None)


def resume(rank: Rank, incarnation: int) -> Generator[Row, Rows, Agreed]:
    """Bring the newest state that all ranks can have into the live state of each.

    Other sources are asked when the caches alone do not decide it: when the newest of all is not the same everywhere.
    Ranks that died over the very first snapshot have lost nothing that was ever whole: they begin anew.

    Args:
        rank: this one.
        incarnation: the launcher's, at least.

    Raises:
        CheckpointError: there are states, but none that all can have whole, or it cannot be told whether there are.
    """
    own = set(rank.own())
    rows = yield row_of(own, rank.begun())
    _check_caches(rows)
    held = [keys_of(row) for row in rows]
    begun = all(row[0] for row in rows)
    ask = len({max(keys, default=None) for keys in held}) > 1 or not held[0]
    talk = _Talk(rank, incarnation, held)
    moved: set[Key] = set()
    lost: set[Key] = set()  # what other sources have of it cannot be had
    half = ""
    while True:
        found = (yield from talk.elsewhere()) if ask else talk.outside
        rows = yield row_of(own | (found.keys - lost), bool(lost) or bool(half))
        try:
            key = agree({number: keys_of(row) for number, row in enumerate(rows)})
        except CheckpointError as error:
            if begun and not any(row[0] for row in rows) and talk.nothing_outside:
                return Agreed(None, talk.incarnation, given_up=_NEVER_WHOLE)
            raise CheckpointError(
                f"{half}{error}{talk.why()}, so none is restored; to begin anew on purpose start a new `keepstep run`, "
                "with another --checkpoint-dir or none"
            ) from None
        if key is None:
            if not ask:
                ask = True
                continue
            talk.check_nothing(any(row[0] for row in rows), half)
            return Agreed(None, talk.incarnation)
        result = Copied.WELL
        if key not in own:
            try:
                rank.bring(key)
                own.add(key)
                moved.add(key)
            except CheckpointError as error:
                lost.add(key)
                talk.lost.append(str(error))
                result = Copied.DAMAGED
        rows = yield row_of((), result)
        if any(row[0] for row in rows):
            ask = True
            continue
        result = rank.copy(key)
        rows = yield row_of((), result, rank.wanted(key), key in moved, rank.digest(key))
        if any(row[0] == Copied.IMPOSSIBLE for row in rows):
            raise CheckpointError("another rank could not restore its state: see what it says")
        if not any(row[0] for row in rows):
            pending = frozenset(one for one in frozenset[Key].intersection(*held) if one < key)
            others = tuple(number for number, row in enumerate(rows) if row[2])
            alike = len({row[3] for row in rows}) == 1 and rows[0][3] > 0
            return Agreed(key, talk.incarnation, pending, any(row[1] for row in rows), others, alike)
        half, ask = "the state is half restored, and ", True
        if result == Copied.DAMAGED:
            rank.drop(key)
            own.discard(key)
            if key in moved:
                lost.add(key)


def begin(rank: Rank, incarnation: int) -> Generator[Row, Rows, Agreed]:
    """Agree on what to keep until there is something newer, when nothing is restored.

    Raises:
        CheckpointError: it cannot be told what a source has, so that what is saved could be taken for something else.
    """
    rows = yield row_of(rank.own())
    _check_caches(rows)
    held = [keys_of(row) for row in rows]
    talk = _Talk(rank, incarnation, held)
    if not all(held):
        yield from talk.elsewhere()
        talk.check_reached()
    try:
        key = agree(dict(enumerate(held)))
    except CheckpointError as error:
        return Agreed(None, talk.incarnation, given_up=f"what was saved before is given up: {error}")
    pending = frozenset(one for one in frozenset[Key].intersection(*held) if key and one < key)
    return Agreed(key, talk.incarnation, pending)


def refuse(why: str) -> Generator[Row, Rows, Agreed]:
    """In place of `resume` and `begin` on a rank that has no cache: no other waits for it. Raises CheckpointError."""
    yield row_of((), False, True)
    raise CheckpointError(f"{_NO_CHECKPOINT}: {why}; {_MEND}")


def _check_caches(rows: Rows) -> None:
    without = [number for number, row in enumerate(rows) if row[1]]
    if without:
        raise CheckpointError(
            f"{_NO_CHECKPOINT}: the node of ranks {fold_ranks(without)} has no cache, see what they say; {_MEND}"
        )


@dataclass(slots=True)
class _Talk:
    """What a rank has heard of other sources, and all ranks together."""

    rank: Rank
    least: int
    held: list[frozenset[Key]]
    outside: Elsewhere = Elsewhere()
    unreached: bool = False  # some rank could not be told what a source has
    refused: bool = False  # some rank heard of a state that cannot be had
    something: bool = False  # some rank was offered a state, or cannot be sure that there is none
    highest: int = -1
    asked: bool = False
    lost: list[str] = field(default_factory=list[str])

    @property
    def incarnation(self) -> int:
        caches = [key.incarnation for keys in self.held for key in keys]
        return max(self.least, 1 + max([self.highest, *caches]))

    @property
    def nothing_outside(self) -> bool:
        """Whether it is known that no other source has anything, for any rank."""
        return self.asked and not self.something and not self.unreached and not self.refused

    def elsewhere(self) -> Generator[Row, Rows, Elsewhere]:
        """Ask once, and hear what the others were told."""
        if not self.asked:
            self.asked = True
            self.outside = found = self.rank.elsewhere()
            something = bool(found.keys) or found.unsure
            rows = yield row_of((), len(found.troubles), len(found.refused), found.incarnation + 1, something)
            self.unreached, self.refused = any(row[0] for row in rows), any(row[1] for row in rows)
            self.something = any(row[3] for row in rows)
            self.highest = max(row[2] for row in rows) - 1
        return self.outside

    def why(self) -> str:
        """What this rank knows of why something cannot be had."""
        lines = [*dict.fromkeys([*self.lost, *self.outside.refused, *self.outside.troubles])]
        return f" ({'; '.join(lines)})" if lines else ""

    def check_reached(self) -> None:
        if self.unreached:
            raise CheckpointError(f"it is not known what other sources have{self.why() or _ANOTHER}")

    def check_nothing(self, lost: bool, half: str) -> None:
        """Whether no state means that there never was one. Raises CheckpointError: it does not."""
        if half:
            raise CheckpointError(
                f"{half}no snapshot is left{self.why()}: start from the beginning with a fresh process"
            )
        if lost or self.refused:
            raise CheckpointError(f"there are states, but none that can be had{self.why() or _ANOTHER}")
        self.check_reached()


_NEVER_WHOLE = "the first snapshot was not whole on all ranks yet: the training begins anew"
_NO_CHECKPOINT = "no rank saves or restores a checkpoint"
_MEND = "mend that, or leave that node out, and start `keepstep run` again"
_ANOTHER = ": see what another rank says"


def row_of(keys: Iterable[Key], *numbers: int) -> Row:
    """At most four numbers, and the newest of the keys."""
    packed = sorted((key.pack() for key in keys), reverse=True)[: WIDTH - 4]
    row = [*map(int, numbers), *[0] * (4 - len(numbers)), *packed]
    return row + [0] * (WIDTH - len(row))
