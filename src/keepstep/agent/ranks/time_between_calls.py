"""How an iteration's time passes from call to call of a rank's host, where the host's waits are not recorded.

On a device's backend a call only enqueues its operation. A host that waits for others does so between two calls, mostly
after a receive, or after a small collective whose result it reads (MegaTrace §III-B).
"""

from __future__ import annotations

import numpy as np

from keepstep.agent.ranks.cut import Cut
from keepstep.agent.ranks.event_buffer import chosen
from keepstep.core.events import Kind, Op
from keepstep.core.summary import SMALL_BYTES

_PHASE, _P2P, _RECV = int(Kind.PHASE), int(Kind.P2P), int(Op.RECV)


def time_between_calls(cut: Cut) -> tuple[int, int]:
    """The time after calls that wait for nobody, and the time after receives, in ns; (-1, 0) if it called nothing.

    The time before the first call is in neither: whether the call before it waited is not known here.
    """
    rows = cut.rows
    operations = chosen(rows, (rows["kind"] != _PHASE) & (rows["start_ns"] >= cut.start_ns))
    if not len(operations):
        return -1, 0
    operations = chosen(operations, np.argsort(operations["start_ns"], kind="stable"))
    starts = operations["start_ns"]
    ends = np.append(starts[1:], cut.end_ns)
    gaps = ends - starts - cut.pauses.within(starts, ends)
    messages = operations["kind"] == _P2P
    receives = messages & (operations["op"] == _RECV)
    small = ~messages & (operations["bytes"] <= SMALL_BYTES)
    return int(gaps[~(receives | small)].sum()), int(gaps[receives].sum())
