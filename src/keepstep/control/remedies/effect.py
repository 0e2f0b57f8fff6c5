"""A move that was ordered, until its effect is seen; and how remedies are described in incidents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep.control.incidents.slow_case import SlowCase
from keepstep.control.remedies.device_speeds import Devices
from keepstep.control.remedies.moves import Look, Move
from keepstep.core.incident import Action, Culprit
from keepstep.core.ranges import fold_ranks


@dataclass(slots=True)
class Moved:
    """A move that was ordered for a slowdown.

    Attributes:
        since_s: time of the order; once the job is halted for it, time of the halt.
        devices: speeds of devices before the move; None once shares that fit them were ordered.
        step: the last step before the move.
        agent: peer number of the agent that watched rank 0 until the move.
        pause_s: how long the move took, up to the first new step.
    """

    move: Move
    case: SlowCase
    action: Action
    since_s: float
    devices: Devices | None = None
    halted: bool = False
    step: int = -1
    agent: int | None = None
    done: bool = False
    pause_s: float | None = None


def evidence_of(culprits: Sequence[Culprit], look: Look) -> str:
    """Evidence: how long a micro-batch takes on the slow ranks."""
    told = [
        f"rank {one.rank} {1000 * look.seconds[one.rank]:.3g} ms" for one in culprits if one.rank is not None
    ]
    return f"a micro-batch takes {', '.join(told)}; {culprits[0].slowdown:.2g} × the middle rank of its stage"


def shares_in_words(shares: Sequence[int]) -> str:
    """Shares in a line: ``13 to replicas 0-2, 7 to replica 3``."""
    by_share: dict[int, list[int]] = {}
    for replica, share in enumerate(shares):
        by_share.setdefault(share, []).append(replica)
    told = [
        f"{share} to replica{'s' if len(those) > 1 else ''} {fold_ranks(those)}"
        for share, those in sorted(by_share.items(), reverse=True)
    ]
    return ", ".join(told[:6]) + (", …" if len(told) > 6 else "")
