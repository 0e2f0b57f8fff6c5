"""Something is wrong (or right again) with a rank, as an agent or launcher saw it: the input of the controller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One observation on one rank.

    ``kind``: ``slow``, ``relief``, ``hang``, ``resumed``, ``crash`` or ``exit``: the rank ended with exit code 0 while
    others still ran.
    """

    kind: str
    rank: int
    node: str
    time_s: float  # when it was seen, on the node's clock
    step: int  # the step at which it was seen
    onset_step: int = -1  # slow, relief: first iteration of the new regime
    before_s: float = 0.0  # slow, relief: iteration time before the onset
    after_s: float = 0.0  # slow, relief: iteration time since the onset
    stuck_s: float = 0.0  # hang: how long the rank has made no progress
    limit_s: float = 0.0  # hang: the limit that was exceeded
    phase: int = -1  # core.events.Phase
    exit_code: int = 0  # crash: as `run` would return it (128+N for a signal)
    message: str = ""  # crash: the error's last line, from the error file where there is one
    confidence: float = 1.0
    incarnation: int = 0  # incarnation of the process
    together: int = 1  # slow, relief: steps taken together, within which the onset lies for sure
