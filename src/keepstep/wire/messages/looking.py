"""Messages of programs outside the job that only look: how it stands, what every rank does, which nodes are bad."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from keepstep.wire.messages import limits
from keepstep.wire.messages.limits import Message

MOST_FAULTS = 64  # most faults of nodes that one answer tells
MOST_INCIDENTS = 64  # most incidents that one answer tells
MOST_VIEWERS = 16  # most programs that follow a job at once


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


class Follow(Message, frozen=True):
    """A viewer asks what there is to be seen. Answered by `Followed`, or by `Moved` where the controller is elsewhere.

    A viewer asks one question at a time. The controller keeps nothing of it besides its turn.
    """

    first_node: limits.Count = 0  # rows of nodes from this node rank on
    # What the last answer said; the incidents that have changed since are told.
    register: limits.Token | None = None
    version: limits.Version = 0
    with_links: bool = False


class Followed(Message, frozen=True):
    """Answer to `Follow`: the rows of some nodes and of their ranks, and with the first of them what is of the job.

    What is in ``bytes`` is msgpack; a viewer decodes it into what it needs.
    """

    unix_s: float  # when it was so, on the controller's clock
    nodes: bytes = b""  # a list of the ``nodes`` of ``status.json``, without rows of ranks
    ranks: bytes = b""  # a list of [node rank, [`RankBeat`, …]]
    links: bytes = b""  # a list of [node rank, [`PathRate`, …]], if asked for
    next_node: int = -1  # rows from this node rank on come with the next answer; -1: these were the last ones
    status: bytes = b""  # all else in ``status.json``; only with the first rows
    layout: limits.Line = ""  # the declared parallel layout; "": none was
    register: limits.Token | None = None  # differs between controllers
    version: limits.Version = 0
    # Incidents that have changed, as in their files, those that changed first before others.
    incidents: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MOST_INCIDENTS)] = ()
    more_incidents: bool = False  # more have changed: ask again with ``version``
