"""Messages of ``keepstep check`` on several nodes: between each of them and the one that hosts the check."""

from __future__ import annotations

from typing import Annotated

import msgspec

from keepstep.core.node_row import NodeRow
from keepstep.core.validation import LinkFigure, RankTests, TransferEndpoint
from keepstep.wire.messages import Count, Host, Label, Line, Message, Refused

MOST_LINES = 64  # A conclusion holds at most so many lines.


class Arrived(Message, frozen=True):
    """A node is here. Answered by `PairTests` and `Concluded`, or by `Refused`."""

    node: Host
    pid: Count
    nodes: Count  # for how many it was started; the same on all
    machine: Label = ""  # differs between machines, also where they have one name; "": unknown
    endpoint: TransferEndpoint = TransferEndpoint("", 0, "")  # where it takes test data


class Reported(Message, frozen=True):
    """What the node found on itself."""

    row: NodeRow


class PairTests(Message, frozen=True):
    """To a node: make these transfers with your partner of this round. ``tests.rank`` is your place."""

    number: Count
    tests: RankTests


class PairsTested(Message, frozen=True):
    """Answer to `PairTests`: what was received, and why something was not."""

    number: Count
    links: Annotated[tuple[LinkFigure, ...], msgspec.Meta(max_length=16)] = ()
    missing: Annotated[tuple[Line, ...], msgspec.Meta(max_length=16)] = ()


class Concluded(Message, frozen=True):
    """To all nodes: the check is over. ``unfit``: lines about what is unfit; with none the exit code is 0."""

    unfit: Annotated[tuple[Line, ...], msgspec.Meta(max_length=MOST_LINES)] = ()


ToHost = Arrived | Reported | PairsTested
FromHost = PairTests | Concluded | Refused
