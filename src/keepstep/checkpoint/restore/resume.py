"""How the ranks of a job agree on the state to go on from, considering all sources. No I/O and no torch.

Each rank runs the generator `resume` or `begin`, which yields a row of numbers and is sent the rows of all ranks, by
rank. All ranks branch on these rows only, so all make the same exchanges and come to the same result.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from keepstep.checkpoint.matching import same_moment
from keepstep.checkpoint.memory.slot import SLOTS_PER_RANK
from keepstep.checkpoint.memory.slots import Key, agree, unspoilt
from keepstep.core.errors import OTHER_RANKS, CheckpointError, MisfitError
from keepstep.core.ranges import fold_ranks

WIDTH = 4 + 3 * SLOTS_PER_RANK
"""How many numbers a row has."""

Row = list[int]
Rows = list[Row]


class SaidByAnother(CheckpointError):
    """A restore is refused, and another rank says why."""


class Copied(IntEnum):
    """The result of copying a snapshot into a rank's live state."""

    WELL = 0
    DAMAGED = 1
    IMPOSSIBLE = 2  # the live state has another structure


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What a rank can get from outside its node's cache.

    Attributes:
        keys: states that some source has.
        incarnation: the highest incarnation of anything that a source has; -1: no source has anything.
        refused: a line for each state that a source has and does not offer.
        troubles: a line for each source that did not answer and must.
        unsure: whether some source did not answer.
    """

    keys: frozenset[Key] = frozenset()
    incarnation: int = -1
    refused: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()
    unsure: bool = False


class Rank(Protocol):
    """A rank's own cache, and its access to other sources."""

    @property
    def number(self) -> int:
        """The rank's number: its place among the rows of all."""
        ...

    def own(self) -> frozenset[Key]:
        """The keys that the rank's cache has sealed."""
        ...

    def begun(self) -> bool:
        """Whether all that the cache holds was saved before any snapshot was known to be whole, and is undamaged."""
        ...

    def doubted(self) -> Key | None:
        """The first snapshot in which replicas are known to differ that must not; None when none do."""
        ...

    def elsewhere(self) -> Elsewhere:
        """Ask all other sources what they have."""
        ...

    def bring(self, key: Key) -> None:
        """Bring a state from another source into the cache. Raises CheckpointError."""
        ...

    def copy(self, key: Key) -> Copied:
        """Copy the bytes of a state in the cache into the live state."""
        ...

    def moment(self, key: Key) -> int:
        """When the rank saved a state in the cache, as `matching.Moment` packs it; 0: not known."""
        ...

    def drop(self, key: Key) -> None:
        """Forget a state in the cache, because it is damaged, or fits those of no other rank."""
        ...

    def wanted(self, key: Key) -> bool:
        """Whether the state is to be brought to storage."""
        ...

    def digest(self, key: Key) -> int:
        """A hash of the state in the cache, to be compared with those of other ranks; 0 when that is not needed."""
        ...


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks have agreed on.

    Attributes:
        key: the state that they go on from; None when there is none.
        incarnation: incarnation of what is saved from here on, above that of anything that is kept anywhere.
        pending: older states that every rank holds; those of them that wait for storage are kept.
        wanted: whether the state ``key`` itself waits for storage.
        moved: ranks that did not have the state in their node's cache.
        alike: whether the state is known to be the same on all ranks.
        given_up: why states in the caches are not kept; "" when none are given up.
        doubted: the first snapshot in which replicas differ that must not; None when none do.
    """

    key: Key | None
    incarnation: int
    pending: frozenset[Key] = frozenset()
    wanted: bool = False
    moved: tuple[int, ...] = ()
    alike: bool = False
    given_up: str = ""
    doubted: Key | None = None

    @property
    def warning(self) -> str:
        """What has to be said about doubted snapshots; "" where there is nothing."""
        if not self.key or not self.doubted or self.key.incarnation != self.doubted.incarnation:
            return ""
        is_doubted = self.key.follows(self.doubted)
        what = (
            ", and no older snapshot is left" if is_doubted else ": only snapshots from before are restored"
        )
        return f"replicas differ from step {self.doubted.step} on{what}"


def keys_of(row: Row) -> frozenset[Key]:
    """The keys in a row that `row_of` made."""
    return frozenset(key for key in map(Key.unpack, row[4:]) if key is not None)


def resume(rank: Rank, incarnation: int) -> Generator[Row, Rows, Agreed]:
    """Bring the newest state that all ranks can have into the live state of each.

    Other sources are asked when the caches alone do not decide: when not all ranks have the same newest state.
    Ranks of which no snapshot was ever whole, because they died over the first ones or do not save the same steps,
    begin anew. States that were not saved at the same moment are never restored together, whatever their step is.
    A state in which replicas differ that must not is taken only where there is no other.
    Of the ranks that know why there is none, the first one says it; the others raise `SaidByAnother`.

    ``incarnation`` is the launcher's number of the incarnation; the agreed one is at least that.

    Raises:
        CheckpointError: there are states, but none that all ranks can have whole, or a source did not answer that may
            have one.
    """
    own = set(rank.own())
    here = frozenset(own)
    mark = rank.doubted()
    rows = yield row_of(own, rank.begun(), False, mark.pack() if mark else 0)
    held = _in_caches(rows)
    begun = all(row[0] for row in rows)
    doubted = _first_doubted(Key.unpack(row[2]) for row in rows)
    sound = [unspoilt(keys, doubted) for keys in held]
    ask = len({max(keys, default=None) for keys in sound}) > 1 or not sound[0]
    talk = _Talk(rank, incarnation, held)
    moved: set[Key] = set()
    lost: set[Key] = set()  # states that another source offered but could not bring
    unlike: set[Key] = set()  # states that the ranks have not saved at the same moment
    half = ""
    while True:
        found = (yield from talk.elsewhere()) if ask else talk.outside
        others = found.keys - here - unlike
        offered, has_lost = own | (found.keys - lost - unlike), bool(lost) or bool(half)
        rows = yield row_of(offered, has_lost, bool(others), talk.knows_why, talk.unreadable)
        talk.choose_teller(rows)
        unreadable = {number for number, row in enumerate(rows) if row[3]}
        anew = begun and talk.nothing_new and not any(row[0] or row[1] for row in rows)
        try:
            key = agree({number: keys_of(row) for number, row in enumerate(rows)}, doubted, unreadable)
        except CheckpointError as error:
            if anew:
                return Agreed(None, talk.incarnation, given_up=_UNLIKE if unlike else _NEVER_WHOLE)
            raise talk.refusal(f"{half}{error}{talk.why()}, so none is restored; {_ANEW}") from None
        if key is None:
            if not ask:
                ask = True
                continue
            if unlike and anew:
                return Agreed(None, talk.incarnation, given_up=_UNLIKE)
            if unlike:
                raise talk.refusal(f"{half}no snapshot is left{talk.why()}, so none is restored; {_ANEW}")
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
                talk.unreadable = True
                result = Copied.DAMAGED
        rows = yield row_of((), result, 0 if result else rank.moment(key))
        if any(row[0] for row in rows):
            ask = True
            continue
        if not same_moment(row[1] for row in rows):
            rank.drop(key)
            own.discard(key)
            unlike.add(key)
            talk.lost.append(f"step {key.step} was not saved at the same moment by all ranks")
            ask = True
            continue
        result = rank.copy(key)
        rows = yield row_of((), result, rank.wanted(key), key in moved, rank.digest(key))
        if any(row[0] == Copied.IMPOSSIBLE for row in rows):
            raise SaidByAnother("another rank could not restore its state: see what it says")
        if not any(row[0] for row in rows):
            pending = frozenset(one for one in frozenset[Key].intersection(*held) if one < key)
            others = tuple(number for number, row in enumerate(rows) if row[2])
            alike = len({row[3] for row in rows}) == 1 and rows[0][3] > 0
            wanted = any(row[1] for row in rows)
            return Agreed(key, talk.incarnation, pending, wanted, others, alike, doubted=doubted)
        half, ask = "the state is half restored, and ", True
        if result == Copied.DAMAGED:
            talk.unreadable = True
            rank.drop(key)
            own.discard(key)
            if key in moved:
                lost.add(key)


def _first_doubted(marks: Iterable[Key | None]) -> Key | None:
    """Of the marks in the caches of all ranks the first one of the newest incarnation."""
    found = [mark for mark in marks if mark]
    return min((mark for mark in found if mark.incarnation == max(found).incarnation), default=None)


def begin(rank: Rank, incarnation: int) -> Generator[Row, Rows, Agreed]:
    """Agree on which snapshot to keep until there is a newer one, when nothing is restored.

    Raises CheckpointError when a source does not answer: an incarnation that is there might be used again.
    """
    held = _in_caches((yield row_of(rank.own())))
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
    """Take the place of `resume` and `begin` on a rank without a cache, so that all ranks raise CheckpointError."""
    yield row_of((), False, True)
    raise CheckpointError(f"{_NO_CHECKPOINT}: {why}; {_MEND}")


def _in_caches(rows: Rows) -> list[frozenset[Key]]:
    """The keys that the cache of each rank holds. Raises CheckpointError when a node has no cache."""
    without = [number for number, row in enumerate(rows) if row[1]]
    if without:
        raise SaidByAnother(
            f"{_NO_CHECKPOINT}: the node of ranks {fold_ranks(without)} has no cache, see what they say; {_MEND}"
        )
    return [keys_of(row) for row in rows]


@dataclass(slots=True)
class _Talk:
    """What this rank, and all ranks together, have learned about other sources."""

    rank: Rank
    least: int
    held: list[frozenset[Key]]
    outside: Elsewhere = Elsewhere()
    unreached: bool = False  # whether a source that must answer did not answer some rank
    refused: bool = False  # whether some rank was told of a state that is not offered
    unsure: bool = False  # whether some rank got no answer from a source
    highest: int = -1  # highest incarnation that any rank was told of
    asked: bool = False
    lost: list[str] = field(default_factory=list[str])
    unreadable: bool = False  # whether some state of this rank was damaged, or could not be brought
    tells: bool = True  # whether this rank is the one that says why nothing is restored

    @property
    def incarnation(self) -> int:
        caches = [key.incarnation for keys in self.held for key in keys]
        return max(self.least, 1 + max([self.highest, *caches]))

    @property
    def nothing_new(self) -> bool:
        """Whether every rank knows all that other sources have for it."""
        return self.asked and not self.unsure and not self.unreached and not self.refused

    def elsewhere(self) -> Generator[Row, Rows, Elsewhere]:
        """Ask the other sources, the first time, and exchange the answers between all ranks."""
        if not self.asked:
            self.asked = True
            self.outside = found = self.rank.elsewhere()
            troubles, refused = len(found.troubles), len(found.refused)
            rows = yield row_of((), troubles, refused, found.incarnation + 1, found.unsure)
            self.unreached, self.refused = any(row[0] for row in rows), any(row[1] for row in rows)
            self.unsure = any(row[3] for row in rows)
            self.highest = max(row[2] for row in rows) - 1
        return self.outside

    def why(self) -> str:
        """The reasons that this rank knows for states that cannot be had, in parentheses; "" without any."""
        lines = self._reasons
        if len(lines) > _MOST_TOLD:
            lines[_MOST_TOLD - 1 :] = [f"and {len(lines) - _MOST_TOLD + 1} more like that"]
        return f" ({'; '.join(lines)})" if lines else ""

    @property
    def _reasons(self) -> list[str]:
        return [*dict.fromkeys([*self.lost, *self.outside.refused, *self.outside.troubles])]

    @property
    def knows_why(self) -> bool:
        """Whether this rank knows a reason for states that cannot be had."""
        return bool(self._reasons)

    def choose_teller(self, rows: Rows) -> None:
        """Agree on who says why nothing is restored: the first that knows why, else the first that has least."""
        who = min(range(len(rows)), key=lambda number: (not rows[number][2], len(keys_of(rows[number]))))
        self.tells = who == self.rank.number

    def refusal(self, what: str) -> CheckpointError:
        """The error to raise where all ranks refuse to restore."""
        return CheckpointError(what) if self.tells else SaidByAnother(what)

    def _error(self, what: str) -> CheckpointError:
        return self.refusal(what + why) if (why := self.why()) else SaidByAnother(what + _ANOTHER)

    def check_reached(self) -> None:
        if self.unreached:
            raise self._error("it is not known what other sources have")

    def check_nothing(self, lost: bool, half: str) -> None:
        """Raise CheckpointError unless it is certain that there never was a state."""
        if half:
            raise self.refusal(
                f"{half}no snapshot is left{self.why()}: start from the beginning with a fresh process"
            )
        if lost:
            raise self._error("there are states, but none that can be had")
        self.check_reached()
        if self.refused:
            fits_never = all(OTHER_RANKS in line for line in self.outside.refused)
            what = "there are states, but none that can be had"
            raise MisfitError(what + why) if fits_never and (why := self.why()) else self._error(what)


_NEVER_WHOLE = "no snapshot was whole on all ranks yet: the training begins anew"
_MOST_TOLD = 2  # reasons in a message
_UNLIKE = (
    "the ranks have not saved the same steps at the same time, so no snapshot is restored: the training begins anew; "
    "give save() the same step on all ranks"
)
_ANEW = "to begin anew on purpose start a new `keepstep run`, with another --checkpoint-dir or none"
_NO_CHECKPOINT = "no rank saves or restores a checkpoint"
_MEND = "mend that, or leave that node out, and start `keepstep run` again"
_ANOTHER = ": see what another rank says"


def row_of(keys: Iterable[Key], *numbers: int) -> Row:
    """A row of `WIDTH` numbers: at most four of the caller's, and the newest of the keys, packed."""
    packed = sorted((key.pack() for key in keys), reverse=True)[: WIDTH - 4]
    row = [*map(int, numbers), *[0] * (4 - len(numbers)), *packed]
    return row + [0] * (WIDTH - len(row))
