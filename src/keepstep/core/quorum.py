"""Whether the electors who agreed are enough to decide."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def is_majority(seats: Sequence[int], yes: Collection[int]) -> bool:
    """Whether those who said yes are more than half of ``seats``, where the first of an even number counts twice."""
    twice = len(seats) % 2 == 0
    votes = sum(2 if twice and seat == seats[0] else 1 for seat in seats if seat in yes)
    return 2 * votes > len(seats) + twice


def is_quorum(seats: Sequence[int], former: Sequence[int], yes: Collection[int]) -> bool:
    """Whether ``yes`` is a majority of ``seats``, and of the ``former`` seats while these may still act alone."""
    return is_majority(seats, yes) and (not former or is_majority(former, yes))
