"""Holding a job's ranks for a moment to test them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from keepstep.core.validation import RankFigures, RankTests, TransferEndpoint, Validation
from keepstep.wire.messages.limits import LEAST_HOLD_S, MOST_HOLD_S, Message


class HeldRank(msgspec.Struct, frozen=True, array_like=True):
    """How one rank stands to a hold. ``state``: ring.orders.State; ``why`` it is unable."""

    rank: int
    state: int
    endpoint: TransferEndpoint | None = None  # once it is held
    why: str = ""


class Held(Message, frozen=True):
    """Answer to ``Hold``, and told again whenever it changes: all local ranks."""

    number: int
    node_rank: int
    ranks: tuple[HeldRank, ...]


class Measured(Message, frozen=True):
    """The figures of one rank that has run its ``tests`` in hold ``number``."""

    number: int
    tests: int
    node_rank: int
    figures: RankFigures


class Validate(Message, frozen=True):
    """An operator asks for a validation of these ranks, or of all. Answered by ``Validated``.

    ``hold_s``: how long the job may be held.
    """

    ranks: tuple[int, ...] = ()
    hold_s: Annotated[float, msgspec.Meta(ge=LEAST_HOLD_S, le=MOST_HOLD_S)] = LEAST_HOLD_S


class Hold(Message, frozen=True):
    """Hold your ranks at the end of ``step`` for as long as this is repeated: each renews the lease by ``lease_s``."""

    number: int
    step: int
    lease_s: float


class RunTests(Message, frozen=True):
    """Let held ranks run these tests. ``tests``: their number, unique like the hold's."""

    number: int
    tests: int
    ranks: tuple[RankTests, ...]


class Release(Message, frozen=True):
    """Hold ``number`` is over: go on."""

    number: int


class Validated(Message, frozen=True):
    """Answer to ``Validate``: the outcome, or in one line why there is none."""

    outcome: Validation | None = None
    nodes: tuple[tuple[int, str], ...] = ()  # node name by rank, of the ranks that were tested
    refused: str = ""
