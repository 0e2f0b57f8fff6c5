"""The host of a check, with real connections: who takes part, who is missed, and what all are told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from keepstep import wire
from keepstep.core.errors import RunError
from keepstep.core.node_row import NodeRow
from keepstep.core.validation import LinkFigure, TransferEndpoint
from keepstep.launch.check import check_host
from keepstep.launch.check.check_host import CheckHost, Conclusion
from keepstep.wire.checking import Arrived, Concluded, PairsTested, PairTests, Reported

KEY = wire.RunKey(b"s" * 32)


@dataclass
class Nodes:
    """The nodes of one check, as they connect."""

    server: wire.Server
    host: CheckHost
    clients: list[wire.Client]

    def node(
        self,
        arrived: Arrived,
        *,
        row: NodeRow | None = None,
        answer: Callable[[PairTests], PairsTested | None] | None = None,
    ) -> asyncio.Queue[wire.Message]:
        """Connect a node, which reports ``row``; returns what it is told besides its tests."""
        said: asyncio.Queue[wire.Message] = asyncio.Queue()
        client: Any = None

        def heard(message: wire.Message) -> None:
            if isinstance(message, PairTests) and answer is not None:
                if (found := answer(message)) is not None:
                    client.send(found)
            else:
                said.put_nowait(message)

        client = wire.Client(
            ("127.0.0.1", self.server.port),
            KEY,
            role="checker",
            greet=lambda: [arrived, *([Reported(row)] if row else [])],
            message=heard,
        )
        self.clients.append(client)
        return said


def run(count: int, work: Callable[[Nodes], Awaitable[None]]) -> None:
    async def main() -> None:
        host = CheckHost(count)
        server = await wire.serve("127.0.0.1", 0, KEY, host.callbacks, roles=wire.TO_CHECK)
        nodes = Nodes(server, host, [])
        try:
            await asyncio.wait_for(work(nodes), 60.0)
        finally:
            for client in nodes.clients:
                await client.close()
            await server.close()

    wire.run(main())


def arrived(number: int, nodes: int = 2, *, node: str = "", machine: str = "") -> Arrived:
    name = node or f"gpu-{number}"
    return Arrived(name, number, nodes, machine, TransferEndpoint(f"10.0.0.{number}", 1, "ab"))


def reached(order: PairTests) -> PairsTested:
    """All that the node was to receive came, at one speed."""
    own = [one for one in order.tests.transfers if one.target == order.tests.rank]
    return PairsTested(order.number, tuple(LinkFigure(one.source, one.target, "ring", 1, 1e9) for one in own))


def well(number: int) -> NodeRow:
    return NodeRow(f"gpu-{number}", versions=(("torch", "2.13.0"),))


def test_nodes_that_are_alike() -> None:
    async def work(nodes: Nodes) -> None:
        said = [nodes.node(arrived(one, 3), row=well(one), answer=reached) for one in range(3)]
        concluding = asyncio.ensure_future(nodes.host.conclude(30.0, 30.0))
        for one in said:
            assert await one.get() == Concluded()
        for client in nodes.clients:
            await client.close()
        found = await concluding
        assert (found.unfit, found.slow) == ((), ())
        assert sorted(row.node for row in found.rows) == ["gpu-0", "gpu-1", "gpu-2"]
        assert all(len(row.links) == 2 for row in found.rows)

    run(3, work)


async def concluded(nodes: Nodes, rows_s: float = 30.0) -> Conclusion:
    return await nodes.host.conclude(30.0, rows_s)


def test_a_node_that_finds_itself_unfit_is_told_to_all() -> None:
    async def work(nodes: Nodes) -> None:
        unfit = NodeRow("another name", unfit=("node gpu-1: /data: No such file",))
        said = [
            nodes.node(arrived(0), row=well(0), answer=reached),
            nodes.node(arrived(1), row=unfit, answer=reached),
        ]
        found = await concluded(nodes)
        assert "node gpu-1: /data: No such file" in found.unfit
        assert {row.node for row in found.rows} == {"gpu-0", "gpu-1"}  # a node is called what it came as
        for one in said:
            told = await one.get()
            assert isinstance(told, Concluded)
            assert told.unfit == found.unfit

    run(2, work)


def test_a_node_that_never_reports_and_answers_no_test_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_host, "PAIRS_S", 0.5)
    monkeypatch.setattr(check_host, "_MARGIN_S", 0.5)

    async def work(nodes: Nodes) -> None:
        for one in range(2):
            nodes.node(arrived(one, 3), row=well(one), answer=reached)
        nodes.node(arrived(2, 3), answer=lambda order: None)
        found = await concluded(nodes, rows_s=0.5)
        lines = [line for line in found.unfit if line.startswith("node gpu-2: ")]
        assert lines[0] == "node gpu-2: its checks have not ended within 0.5 s; look at it"
        assert not any(
            line.startswith(("node gpu-0: no data", "node gpu-1: no data")) for line in found.unfit
        )

    run(3, work)


def test_a_node_that_goes_is_not_waited_for() -> None:
    async def work(nodes: Nodes) -> None:
        for one in range(2):
            nodes.node(arrived(one, 3), row=well(one), answer=reached)
        nodes.node(arrived(2, 3))
        concluding = asyncio.ensure_future(concluded(nodes))
        while not nodes.host._begun:
            await asyncio.sleep(0.01)
        await nodes.clients[2].close()
        found = await concluding
        assert "node gpu-2: it has gone before its checks ended; look at it" in found.unfit

    run(3, work)


def test_when_not_all_come_those_who_did_are_told_who_they_are() -> None:
    async def work(nodes: Nodes) -> None:
        said = nodes.node(arrived(0), row=well(0))
        with pytest.raises(RunError, match=r"only 1 of 2 nodes came within 1 s \(gpu-0\); start the others"):
            await nodes.host.conclude(1.0, 1.0)
        assert isinstance(await said.get(), wire.Refused)

    run(2, work)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (arrived(1, 3), "node gpu-1 was started with --nnodes 3, the host with 2"),
        (arrived(1, node="gpu-0", machine="m"), "node gpu-0 came twice (processes 0 and 1)"),
    ],
)
def test_who_is_refused(second: Arrived, reason: str) -> None:
    async def work(nodes: Nodes) -> None:
        nodes.node(arrived(0, machine="m"))
        while not nodes.host._nodes:
            await asyncio.sleep(0.01)
        told = await nodes.node(second).get()
        assert isinstance(told, wire.Refused)
        assert told.reason.startswith(reason)

    run(2, work)


def test_one_too_many_is_refused_and_hosts_of_one_name_are_told_apart() -> None:
    async def work(nodes: Nodes) -> None:
        for one in range(2):
            nodes.node(arrived(one, node="vm"), row=well(one), answer=reached)
            while len(nodes.host._nodes) <= one:
                await asyncio.sleep(0.01)
        told = await nodes.node(arrived(2)).get()
        assert told == wire.Refused("node gpu-2 came when the check had its 2 nodes")
        found = await concluded(nodes)
        assert [row.node for row in found.rows] == ["vm", "vm (10.0.0.1)"]

    run(2, work)
