"""Times of single ranks in logs of Megatron-LM: its timers of all ranks, and what its straggler detector prints."""

from __future__ import annotations

import re

MARKS = (b"across ranks", b"/Rnk")
"""One of these is in every line that may matter while `RankTimers.in_block` is false."""

_BLOCK = re.compile(r"(?<!\) )\btimes? across ranks \(ms\)")
_TIMER = re.compile(r"([a-z][a-z/-]{1,60}):\s*$")
_RANK = re.compile(r"\brank\s{1,4}(\d{1,7}):\s{1,8}(\d{1,12}(?:\.\d{1,9})?)\s*$")
_SLOWEST = re.compile(
    r"MnRtt/Rnk: {0,4}(\d{1,12}(?:\.\d{1,9})?)ms/(\d{1,7}) \| MxRtt/Rnk: {0,4}(\d{1,12}(?:\.\d{1,9})?)ms/(\d{1,7})"
)
_OTHER_LINES = 32  # lines of other writers that may stand among those of a block
_MOST_TIMES = 2_000_000  # that are kept; later ones are not looked at
# Timers that stop before the rank waits for others.
_OWN = frozenset({"forward-compute", "backward-compute", "batch-generator", "optimizer-inner-step"})


class RankTimers:
    """Takes the lines of a log, one after the other.

    Attributes:
        in_block: whether the lines now may be timers.
        seconds: by iteration and rank: what a rank needs for itself, as far as the log tells of it.
    """

    def __init__(self) -> None:
        self._timer = ""  # the timer that the lines now are about; "" outside of them
        self._block_ends = 0  # lines without a timer, after which a block of timers is over
        self._by_timer: dict[int, dict[str, dict[int, float]]] = {}
        self._room = _MOST_TIMES

    @property
    def in_block(self) -> bool:
        return self._block_ends > 0

    @property
    def seconds(self) -> dict[int, dict[int, float]]:
        """The sum of the timers, by iteration and rank."""
        found: dict[int, dict[int, float]] = {}
        for number, timers in self._by_timer.items():
            total = found.setdefault(number, {})
            for by_rank in timers.values():
                for rank, seconds in by_rank.items():
                    total[rank] = total.get(rank, 0.0) + seconds
        return found

    def take(self, text: str, number: int) -> None:
        """Take a line; ``number``: the iteration that was printed last, which timers follow."""
        slowest = _SLOWEST.search(text)
        if slowest is not None:
            for seconds, rank in ((slowest[1], slowest[2]), (slowest[3], slowest[4])):
                self._set(number, "straggler detector", int(rank), float(seconds) / 1e3)
        elif _BLOCK.search(text):
            self._block_ends, self._timer = _OTHER_LINES, ""
        elif self.in_block and (one := _RANK.search(text)):
            self._block_ends = _OTHER_LINES
            if self._timer in _OWN:
                self._set(number, self._timer, int(one[1]), float(one[2]) / 1e3)
        elif self.in_block and (timer := _TIMER.search(text)):
            self._timer = timer[1]
        elif self.in_block:
            self._block_ends -= 1

    def _set(self, number: int, timer: str, rank: int, seconds: float) -> None:
        if self._room:
            self._room -= 1
            self._by_timer.setdefault(number, {}).setdefault(timer, {})[rank] = seconds
