"""Nodes without anything behind them, all in this process: each has two connections, as a launcher and as an agent.

    python stand_in_nodes.py HOST:PORT SECRET_FILE RUN_ID NODES

Prints how many connections there are once all are and have stayed for a second, then again at the end of standard
input, and how often one had to be made again. Agents send a heartbeat a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

from keepstep import wire
from keepstep.core.descriptors import raise_limit

_AT_ONCE = 100  # that have begun to connect and are not there yet
_BEAT_S = 1.0


class Nodes:
    """All of them."""

    def __init__(self, address: tuple[str, int], key: wire.RunKey, count: int) -> None:
        self._address, self._key, self._count = address, key, count
        self.launchers: list[wire.Client] = []
        self.agents: list[wire.Client] = []
        self.placed = 0
        self.beats = 0

    @property
    def clients(self) -> list[wire.Client]:
        return [*self.launchers, *self.agents]

    @property
    def connected(self) -> int:
        return sum(client.connected for client in self.clients)

    @property
    def again(self) -> int:
        return sum(client.counters.connections - 1 for client in self.clients)

    async def join(self) -> None:
        """Until all are connected and have a place, and the controller has closed none of them for a second.

        A client that has sent its proof counts as connected, although the controller may close it before it reads the
        proof: then it was the oldest of too many.
        """
        for node in range(self._count):
            self._begin(node)
            while len(self.clients) - self.connected > _AT_ONCE:
                await asyncio.sleep(0.01)
        made = -1
        while self.connected < 2 * self._count or self.placed < self._count or self.again != made:
            made = self.again
            await asyncio.sleep(1)

    async def beat(self) -> None:
        """For ever."""
        while True:
            self.beats += 1
            for node, agent in enumerate(self.agents):
                agent.send(
                    wire.Heartbeat(node, self.beats, time.monotonic(), (wire.RankBeat(node, 7, 1, 1),))
                )
            await asyncio.sleep(_BEAT_S)

    def _begin(self, node: int) -> None:
        name = f"gpu-{node:04d}"
        join = wire.Join(name, "127.0.0.1", 1, 29500, node, self._count, self._count)
        hellos = wire.Hello("launcher", name, -1, os.getpid()), wire.Hello("agent", name, node, os.getpid())
        self.launchers.append(self._connect("launcher", hellos[0], join))
        self.agents.append(self._connect("agent", hellos[1]))

    def _connect(self, role: wire.Role, *greeting: wire.Message) -> wire.Client:
        return wire.Client(
            self._address, self._key, role=role, greet=lambda: greeting, message=self._received
        )

    def _received(self, message: wire.Message) -> None:
        self.placed += isinstance(message, wire.Placement)


async def main(words: list[str]) -> None:
    address, secret, run_id, count = wire.parse_address(words[0]), words[1], words[2], int(words[3])
    nodes = Nodes(address, wire.RunKey(wire.read_secret(secret), run_id), count)
    began_s = time.monotonic()
    await nodes.join()
    beats = asyncio.get_running_loop().create_task(nodes.beat())
    tell(nodes, began_s)
    await asyncio.to_thread(sys.stdin.read)
    tell(nodes, began_s)
    beats.cancel()


def tell(nodes: Nodes, began_s: float) -> None:
    told = {
        "connected": nodes.connected,
        "again": nodes.again,
        "beats": nodes.beats,
        "seconds": round(time.monotonic() - began_s, 2),
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    raise_limit()
    wire.run(main(sys.argv[1:]))
