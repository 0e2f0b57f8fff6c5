"""Messages about what ranks are ordered to do: to be held and tested, and to compute shares of micro-batches."""

from __future__ import annotations

from typing import Annotated

import msgspec

from keepstep.core.microbatch_shares import Split
from keepstep.core.validation import RankFigures, RankTests, TransferEndpoint, Validation
from keepstep.wire.messages import limits
from keepstep.wire.messages.limits import LEAST_HOLD_S, MOST_HOLD_S, Message


class HeldRank(msgspec.Struct, frozen=True, array_like=True):
    """How far one rank is with a hold. ``state``: a `ring.orders.State`; ``why``: the reason if unable."""

    rank: int
    state: int
    endpoint: TransferEndpoint | None = None  # set once the rank is held
    why: str = ""


class Held(Message, frozen=True):
    """Answer to `Hold` for all local ranks, repeated whenever it changes."""

    number: int
    node_rank: int
    ranks: tuple[HeldRank, ...]


class Measured(Message, frozen=True):
    """The results of one rank that has run its ``tests`` in hold ``number``."""

    number: int
    tests: int
    node_rank: int
    figures: RankFigures


class Validate(Message, frozen=True):
    """An operator asks to validate these ranks, or all if none is given. Answered by `Validated`.

    ``hold_s``: how long the job may be held.
    """

    ranks: tuple[int, ...] = ()
    hold_s: Annotated[float, msgspec.Meta(ge=LEAST_HOLD_S, le=MOST_HOLD_S)] = LEAST_HOLD_S


class Hold(Message, frozen=True):
    """Hold your ranks at the end of ``step``, until ``lease_s`` pass without a repetition of this message."""

    number: int
    step: int
    lease_s: float


class RunTests(Message, frozen=True):
    """Let held ranks run these tests. ``tests`` identifies them, as ``number`` identifies the hold."""

    number: int
    tests: int
    ranks: tuple[RankTests, ...]


class Release(Message, frozen=True):
    """Hold ``number`` is over: continue."""

    number: int


class Validated(Message, frozen=True):
    """Answer to `Validate`: the outcome, or one line that says why there is none."""

    outcome: Validation | None = None
    nodes: tuple[tuple[int, str], ...] = ()  # rank and node name of each tested rank
    refused: str = ""


class Splits(Message, frozen=True):
    """How the ranks of a node divide micro-batches. Sent when that has changed."""

    node_rank: int
    ranks: Annotated[tuple[Split, ...], msgspec.Meta(max_length=limits.MOST_HELD_RANKS)]


class Shares(Message, frozen=True):
    """Micro-batches per replica, sent to the job's first rank, which tells the others.

    ``number`` only grows during a run.
    """

    number: int
    rank: limits.Rank
    incarnation: int
    shares: Annotated[tuple[limits.Count, ...], msgspec.Meta(max_length=limits.MOST_REPLICAS)]
