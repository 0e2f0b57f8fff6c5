"""Messages between a launcher and a worker that outlives its incarnation, on a socket of whole messages."""

ADDRESS = "KEEPSTEP_STAYING"
"""Environment variable with the launcher's abstract address. Where it is unset, no worker outlives an incarnation."""

STAYS = "stays"
"""Sent by a worker: it can leave its training and begin it again."""

LEAVE = "leave"
"""Sent by the launcher: the incarnation is over."""

LEFT = "left"
"""Sent by a worker: nothing of the incarnation runs in it any more."""

REFUSED = "refused"
"""Sent by a worker: it cannot leave, or not stay; the rest of the message says why."""

LOST = "lost"
"""Sent by a worker: its training has ended because it lost others, and can be left; the rest is the error."""

MOST_BYTES = 1 << 20
"""Longest message."""
