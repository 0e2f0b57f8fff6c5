"""The node at which the others meet for a check: it gathers their rows, has pairs of them tested, and concludes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from keepstep import wire
from keepstep.core.errors import RunError
from keepstep.core.node_row import NodeRow
from keepstep.core.validation import LinkFigure, RankTests
from keepstep.core.within import within
from keepstep.validate import node_pairs
from keepstep.validate.judge_nodes import compared, with_lines
from keepstep.validate.node_pairs import Pair
from keepstep.validate.plan import Pairs
from keepstep.wire.checking import MOST_LINES, Arrived, Concluded, PairsTested, PairTests, Reported

logger = logging.getLogger("keepstep.launch")

PAIRS_S = 6.0  # how long the transfers of one round may take
_MARGIN_S = 4.0  # how much later the answer may come
_SAID_S = 2.0  # how long the conclusion may take to reach the nodes
_MOST_LINE = 500


@dataclass(slots=True)
class _Node:
    arrived: Arrived
    peer: wire.Connection
    name: str
    row: NodeRow | None = None
    is_here: bool = True
    tested: PairsTested | None = None


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What a check of several nodes came to. ``broken`` and ``slow``: links, a line each."""

    rows: tuple[NodeRow, ...]
    pairs: tuple[Pair, ...] = ()
    broken: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()

    @property
    def unfit(self) -> tuple[str, ...]:
        """Everything for which the exit code is 1."""
        return (*(line for row in self.rows for line in row.unfit), *self.broken)


class CheckHost:
    """Answers the nodes of one check. All calls come from one event loop."""

    def __init__(self, nodes: int) -> None:
        self._count = nodes
        self._nodes: list[_Node] = []
        self._begun = False
        self._news = asyncio.Event()
        self.callbacks = wire.ServerCallbacks(self._received, lambda peer: None, self._gone)

    async def conclude(self, join_s: float, rows_s: float) -> Conclusion:
        """Wait for the nodes and their rows, test pairs of them, and tell them the outcome.

        ``join_s``: how long the others are waited for; ``rows_s``: how long each may take to check itself.

        Raises:
            RunError: not all of them came.
        """
        if not await self._until(lambda: len(self._nodes) >= self._count, join_s):
            here = ", ".join(sorted(one.name for one in self._nodes)[:16]) or "none"
            told = f"only {len(self._nodes)} of {self._count} nodes came within {join_s:g} s ({here})"
            reason = f"{told}; start the others"
            for one in self._nodes:
                one.peer.send(wire.Refused(reason))
            raise RunError(reason)
        self._begun = True
        await self._until(lambda: all(one.row or not one.is_here for one in self._nodes), rows_s)
        pairs = await self._test_pairs()
        names = [one.name for one in self._nodes]
        judged = node_pairs.judge_pairs(names, pairs)
        rows = tuple(
            replace(_row(one, rows_s), links=tuple(node_pairs.links_of(place, names, pairs)))
            for place, one in enumerate(self._nodes)
        )
        rows = tuple(
            with_lines(row, (one for one in judged.nodes if one.node == row.node)) for row in compared(rows)
        )
        conclusion = Conclusion(rows, pairs, judged.broken, judged.slow)
        lines = conclusion.unfit
        said = [line[:_MOST_LINE] for line in lines[: MOST_LINES - 1]]
        if len(lines) > len(said):
            said.append(f"and {len(lines) - len(said)} more lines")
        for one in self._nodes:
            one.peer.send(Concluded(tuple(said)))
        # Nodes leave once they have heard it.
        await self._until(lambda: not any(one.is_here for one in self._nodes), _SAID_S)
        return conclusion

    async def _test_pairs(self) -> tuple[Pair, ...]:
        count = len(self._nodes)
        pairs: list[Pair] = []
        for number, chosen in enumerate(node_pairs.first_rounds(count)):
            pairs += await self._round(number, chosen)
        looks = node_pairs.second_looks(count, node_pairs.merged(pairs))
        for number, chosen in enumerate(looks, node_pairs.MOST_ROUNDS):
            pairs += await self._round(number, chosen)
        return node_pairs.merged(pairs)

    async def _round(self, number: int, pairs: Pairs) -> tuple[Pair, ...]:
        """One round: all pairs at once."""
        planned = node_pairs.transfers(number, pairs)
        asked: dict[int, _Node] = {}
        for pair in pairs:
            for place in pair:
                node = asked[place] = self._nodes[place]
                node.tested = None
                own = tuple(one for one in planned if place in (one.source, one.target))
                ends = {one.target: self._nodes[one.target].arrived.endpoint for one in own}
                node.peer.send(PairTests(number, RankTests(place, own, ends, PAIRS_S)))
        await self._until(
            lambda: all(one.tested or not one.is_here for one in asked.values()), PAIRS_S + _MARGIN_S
        )
        links: list[LinkFigure] = []
        troubles: dict[int, Sequence[str]] = {}
        for place, node in asked.items():
            if node.tested is not None:
                # What a node says counts for its own transfers only.
                links += [one for one in node.tested.links if one.target == place]
                troubles[place] = node.tested.missing
            else:
                troubles[place] = (f"{node.name} {'did not answer' if node.is_here else 'has gone'}",)
        return node_pairs.measured(pairs, links, troubles)

    async def _until(self, done: Callable[[], bool], patience_s: float) -> bool:
        """Wait until ``done()``; False where it takes longer."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + patience_s
        while not done():
            self._news.clear()
            left_s = until_s - loop.time()
            if left_s <= 0:
                return False
            try:
                await within(left_s, self._news.wait())
            except asyncio.TimeoutError:
                return done()
        return True

    def _received(self, peer: wire.Connection, message: wire.Message) -> None:
        self._news.set()
        if isinstance(message, Arrived):
            if reason := self._objection(message):
                peer.send(wire.Refused(reason))
                return
            name = message.node or "?"
            if any(one.name == name for one in self._nodes):
                name = f"{name} ({message.endpoint.host})"[:255]
            self._nodes.append(_Node(message, peer, name))
            return
        node = next((one for one in self._nodes if one.peer is peer), None)
        if node is None:
            return
        if isinstance(message, Reported):
            node.row = replace(message.row, node=node.name, links=())
        elif isinstance(message, PairsTested):
            node.tested = message

    def _objection(self, arrived: Arrived) -> str:
        """Why a node cannot take part; "": it can."""
        if arrived.nodes != self._count:
            return (
                f"node {arrived.node} was started with --nnodes {arrived.nodes}, the host with {self._count}"
            )
        if self._begun or len(self._nodes) >= self._count:
            return f"node {arrived.node} came when the check had its {self._count} nodes"
        for one in self._nodes:
            if (
                one.arrived.node == arrived.node
                and arrived.machine
                and one.arrived.machine == arrived.machine
            ):
                return (
                    f"node {arrived.node} came twice (processes {one.arrived.pid} and {arrived.pid}); "
                    "start one check on each node (srun --ntasks-per-node=1)"
                )
        return ""

    def _gone(self, peer: wire.Connection, reason: str) -> None:
        self._news.set()
        if not self._begun:
            self._nodes = [one for one in self._nodes if one.peer is not peer]
        for one in self._nodes:
            if one.peer is peer:
                one.is_here = False


def _row(node: _Node, rows_s: float) -> NodeRow:
    """The node's row; where none came, one that says so."""
    if node.row is not None:
        return node.row
    what = (
        f"its checks have not ended within {rows_s:g} s"
        if node.is_here
        else "it has gone before its checks ended"
    )
    return NodeRow(node.name, unfit=(f"node {node.name}: {what}; look at it",))
