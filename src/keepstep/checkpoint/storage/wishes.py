"""Which saved steps all ranks bring to storage: agreed on before the save, where all ranks are in the same one."""

from __future__ import annotations

import time
from collections.abc import Callable

from keepstep.checkpoint.matching import Matches
from keepstep.checkpoint.memory.cache_server import PUT_OFF
from keepstep.checkpoint.memory.rank_slots import RankSlots
from keepstep.checkpoint.memory.slots import Key
from keepstep.checkpoint.pace import Pace
from keepstep.checkpoint.restore.resume import Row, Rows, keys_of, row_of
from keepstep.checkpoint.storage.cadence import Cadence, Storing

_ALONE_S = 120.0  # after which a step that not all ranks have waiting for storage is given up
_POLL_S = 0.05


class Wishes:
    """One rank's part in the agreement. ``turns``: slots that are not for steps on their way to storage."""

    def __init__(
        self,
        storing: Storing,
        cache: RankSlots,
        matches: Matches,
        pace: Pace,
        gather: Callable[[Row], Rows],
        say: Callable[[str], None],
        turns: int,
    ) -> None:
        self._storing, self._cache, self._matches, self._pace = storing, cache, matches, pace
        self._gather, self._say, self._turns = gather, say, turns
        self._cadence = Cadence(storing)
        self._owed = (
            False  # whether a step was asked for when none could be taken on, so that the next one is
        )
        self._obeyed: Key | None = None  # the last order of an operator that was followed
        self._unkept: Key | None = None  # the step that was to go to storage but could not be saved here
        self._alone: dict[Key, float] = {}  # since when a step waits for storage here, but not on all ranks

    def begin(self, step: int) -> None:
        """Begin an incarnation, which goes on after ``step``."""
        self._cadence.begin(step)

    def note(self, step: int, now_s: float, blocked_s: float) -> None:
        """Measure saves, as `Cadence.note`."""
        self._cadence.note(step, now_s, blocked_s, pending=bool(self._cache.wanted()))

    def takes_on(self, key: Key, persist: bool | None, unmet: Callable[[], object]) -> bool:
        """Whether all ranks bring the step to storage: it is due or asked for, and each rank has a slot to spare.

        One that is asked for with ``persist``, or by an operator, waits for a slot for a step's time; then the next
        save takes its place.
        ``unmet`` is called where not all ranks are here. `kept` must be called once the step is in its slot.
        """
        if persist is None and self._is_ordered(key):
            persist = True
        if persist is False or not (persist or self._owed or self._cadence.due(key.step)):
            return False
        if not self._matches.meet(f"store/{key.step}", self._pace.patience_s):
            self._put_off(persist)
            unmet()
            return False
        deadline_s = time.monotonic() + (self._pace.patience_s() if persist else 0.0)
        while True:
            pending = self._cache.wanted()
            full = len(pending) >= max(1, self._cache.count - self._turns)
            late = time.monotonic() >= deadline_s
            unkept = self._unkept.pack() if self._unkept else 0
            rows = self._gather(row_of(pending, full, late, self._cadence.proposal(), unkept))
            self._cadence.agree(row[2] for row in rows)
            self._let_go(rows)
            if not any(row[0] for row in rows):
                self._cadence.accepted(key.step, time.monotonic())
                self._owed, self._unkept = False, key
                return True
            if any(row[1] for row in rows):
                self._put_off(persist)
                return False
            time.sleep(_POLL_S)

    def _is_ordered(self, key: Key) -> bool:
        """Whether an operator wants the first step from an earlier one on, and this is that."""
        ordered = self._cache.board.ordered()
        if ordered is None or ordered == self._obeyed:
            return False
        if key.incarnation != ordered.incarnation or key < ordered:
            return False
        self._obeyed = ordered
        return True

    def _put_off(self, persist: bool | None) -> None:
        """Leave a step that was asked for to the next save; where there is none, the end of the run makes up for it."""
        if persist and not self._owed:
            self._owed = True
            self._cache.claim(PUT_OFF)

    def kept(self) -> None:
        """The step that was taken on is in its slot."""
        self._unkept = None

    def _let_go(self, rows: Rows) -> None:
        """Give up steps on their way to storage that cannot become whole there, because a rank lacks its part."""
        for number, row in enumerate(rows):
            key = Key.unpack(row[3])
            if key is not None:
                self._cache.let_go(key)
                if self._cache.rank == 0:
                    self._say_left_out(key.step, f"rank {number} did not keep it")
        self._unkept = None
        pending = self._cache.wanted()
        alone = {key for key in pending if not all(key in keys_of(row) for row in rows)}
        now_s = time.monotonic()
        self._alone = {key: self._alone.get(key, now_s) for key in alone}
        for key, since_s in self._alone.items():
            # Ranks learn within seconds of each other that a step is on storage.
            if now_s - since_s > _ALONE_S:
                self._cache.let_go(key)
                self._say_left_out(key.step, "not all ranks have it any more")

    def _say_left_out(self, step: int, why: str) -> None:
        self._say(f"step {step} is not brought to storage {self._storing.where}: {why}")
