"""Messages about how many micro-batches each replica computes."""

from __future__ import annotations

from typing import Annotated

import msgspec

from keepstep.core.microbatch_shares import Split
from keepstep.wire.messages.limits import MOST_HELD_RANKS, MOST_REPLICAS, Count, Message, Rank


class Splits(Message, frozen=True):
    """How the ranks of a node divide micro-batches. Sent when that has changed."""

    node_rank: int
    ranks: Annotated[tuple[Split, ...], msgspec.Meta(max_length=MOST_HELD_RANKS)]


class Shares(Message, frozen=True):
    """Micro-batches per replica, sent to the job's first rank, which tells the others.

    ``number`` only grows during a run.
    """

    number: int
    rank: Rank
    incarnation: int
    shares: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MOST_REPLICAS)]
