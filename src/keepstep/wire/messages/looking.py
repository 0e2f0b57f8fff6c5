"""Messages of a program outside the job that only looks: how the job stands, and which nodes are proven to be bad."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from keepstep.wire.messages import limits
from keepstep.wire.messages.limits import Message

MOST_FAULTS = 64  # most faults of nodes that one answer tells


class Look(Message, frozen=True):
    """Somebody asks how the job stands. Answered by `Overview`, or by `Moved` where the controller is elsewhere."""


class FaultyNode(msgspec.Struct, frozen=True, array_like=True):
    """A fault of a node that an incident proves, as far as the job can prove it."""

    node: limits.Host
    kind: Literal["hardware", "lost", "slow"]
    incident: limits.Count
    unix_s: float  # when the incident was detected, on the controller's clock
    text: limits.Line


class Overview(Message, frozen=True):
    """Answer to `Look`."""

    state: limits.Label  # a value of `JobState`
    nodes: limits.Count  # nodes that play ranks
    spares: limits.Count
    step: int  # the newest step; -1: none yet
    incarnation: limits.Count = 0
    verdict: limits.Line = ""  # the newest incident in one line
    faults: Annotated[tuple[FaultyNode, ...], msgspec.Meta(max_length=MOST_FAULTS)] = ()
