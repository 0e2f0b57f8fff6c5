"""What a launcher and a worker that outlives its incarnation say to each other, on a socket of whole messages."""

ADDRESS = "KEEPSTEP_STAYING"
"""Variable of a worker: where its launcher hears it (an abstract address). Unset: none outlives an incarnation."""

STAYS = "stays"
"""Worker: it can leave its training and begin it again."""

LEAVE = "leave"
"""Launcher: the incarnation is over."""

LEFT = "left"
"""Worker: nothing of the incarnation runs in it any more."""

REFUSED = "refused"
"""Worker: it cannot leave, or not stay; the rest of the message says why."""

MOST_BYTES = 1 << 20
