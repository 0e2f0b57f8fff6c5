"""Is a rank used to make this call at this place of its order? Judged by what it called before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LEAST_PAST = 8  # with fewer calls before one there is no past to compare it with
_CONTEXT = 8  # most calls before one that are its place


def usual(calls: NDArray[np.uint64], at: int) -> int:
    """How often the call at this index was made before at the same place; -1 if the place is new, too.

    The place is the longest run of up to 8 calls right before it that was there before.

    Args:
        calls: one number for each call, equal for equal calls, in the order in which they were made.
        at: index of the call.
    """
    if at < LEAST_PAST:
        return -1
    places = np.arange(1, at)  # where the same run of calls has ended before
    for back in range(1, _CONTEXT + 1):
        longer = places[places >= back]
        longer = longer[calls[longer - back] == calls[at - back]]
        if not len(longer):
            return -1 if back == 1 else int(np.count_nonzero(calls[places] == calls[at]))
        places = longer
    return int(np.count_nonzero(calls[places] == calls[at]))
