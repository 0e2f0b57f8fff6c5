"""Plays a node in the end-to-end test of backups: a launcher's cache, two ranks that save, and the agent.

Arguments: folder, node's name, node rank, world size, the controller's address, ``train`` or ``return``. Saves whenever
``FOLDER/step`` names a later step, and writes the digest of what every rank saved to ``FOLDER/saved-RANK-STEP``. Told
to ``return`` it plays the agent itself, brings what its ranks had from the other nodes first, and writes
``FOLDER/returned-RANK``. Ends with its host, or when there is a ``FOLDER/end``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tests.unit.checkpoint.sealed_slots import seal_state, stands

from keepstep import wire
from keepstep.agent.services.node_backups import NeighbourSource, NodeBackups
from keepstep.checkpoint.memory.cache import Backing, Cache
from keepstep.checkpoint.memory.cache_server import CacheServer, Reserve, ask
from keepstep.checkpoint.memory.incoming import Incoming
from keepstep.checkpoint.memory.rank_slots import RankSlots
from keepstep.checkpoint.memory.slot import Board, Slot
from keepstep.checkpoint.memory.slots import Key, Record, slot_bytes
from keepstep.core.errors import CheckpointError
from keepstep.core.own_address import address_towards
from keepstep.ring import create

PER_NODE = 2
FLOATS = 3_000_000


def state_of(rank: int, step: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(1000 * step + rank)
    return {"weight": torch.randn(FLOATS, generator=made), "step": step}


@contextlib.contextmanager
def loop_beside() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)


class Node:
    def __init__(self, words: list[str], loop: asyncio.AbstractEventLoop) -> None:
        self.folder, self.name = Path(words[0]), words[1]
        self.rank, self.world, self.controller = int(words[2]), int(words[3]), words[4]
        self.ranks = range(PER_NODE * self.rank, PER_NODE * (self.rank + 1))
        self.loop, self.saved = loop, 0
        self.cache = Cache(2 << 30, Backing(PER_NODE, 1))

        async def serve() -> CacheServer:
            return CacheServer(self.cache)

        self.server = asyncio.run_coroutine_threadsafe(serve(), loop).result()

    def start_agent(self) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "keepstep.agent", "--run-dir", str(self.folder)),
            *("--controller", self.controller, "--secret-file", str(self.folder / "secret")),
            *("--node", self.name, "--node-rank", str(self.rank)),
            *("--cache", self.server.address, "--backups", "1"),
        ]
        for rank in self.ranks:
            command += ["--ring", f"{rank}=/proc/{os.getpid()}/fd/{create(1024)}"]
        return subprocess.Popen(command)

    def play_agent(self) -> NodeBackups:
        key = wire.RunKey(wire.read_secret(self.folder / "secret"))
        host, port = wire.parse_address(self.controller)
        client: list[wire.Client] = []

        def send(message: wire.Message) -> None:
            self.loop.call_soon_threadsafe(lambda: client[0].send(message))

        backups = NodeBackups(
            self.server.address,
            self.ranks,
            self.name,
            self.rank,
            key,
            send,
        )
        backups.use_addresses([address_towards(host)])

        def received(message: wire.Message) -> None:
            if isinstance(message, wire.BackUp | wire.Located):
                backups.received(message)

        async def begin() -> None:
            client.append(
                wire.Client(
                    (host, port),
                    key,
                    role="agent",
                    greet=lambda: [wire.Hello("agent", self.name, self.rank, os.getpid()), *backups.again()],
                    message=received,
                )
            )

        asyncio.run_coroutine_threadsafe(begin(), self.loop).result()
        backups.start()
        return backups

    def save(self, step: int) -> None:
        key = Key(0, step)
        for rank in self.ranks:
            rank_slots = RankSlots(self.server.address, rank)
            taken = rank_slots.take(lambda: key) if rank_slots.slots else 0
            assert taken is not None
            if rank_slots.slots:
                rank_slots.slots[taken].unlock()
            rank_slots.close()
            data = seal_state(
                self.server.address, rank, state_of(rank, step), key,
                rank=rank, world_size=self.world, index=taken,
            )  # fmt: skip
            self.write(f"saved-{rank}-{step}", hashlib.sha256(data).hexdigest())
        self.saved = step

    def bring_back(self, backups: NodeBackups) -> None:
        source = NeighbourSource(backups)
        for rank in self.ranks:
            keys: frozenset[Key] = frozenset()
            while not keys:
                time.sleep(0.2)
                with contextlib.suppress(CheckpointError):  # the controller does not know yet
                    keys = source.keys(rank)
            key = max(keys)
            with ExitStack() as stack:

                def room(record: Record, rank: int = rank, stack: ExitStack = stack) -> Incoming:
                    answer = ask(self.server.address, Reserve(rank, slot_bytes(record), 2))
                    board, slots = Board(answer.board), [Slot(one, apart=True) for one in answer.slots]
                    stack.callback(board.close)
                    for slot in slots:
                        stack.callback(slot.close)
                    return Incoming(slots[0], board, rank, 0, record)

                where = source.bring(key, rank, room)
            data = stands(self.server.address, rank)[key]
            found = {"step": key.step, "digest": hashlib.sha256(data).hexdigest(), "where": where}
            self.write(f"returned-{rank}", json.dumps(found))
            self.saved = key.step

    def write(self, name: str, text: str) -> None:
        draft = self.folder / f".{name}"
        draft.write_text(text)
        draft.rename(self.folder / name)

    def follow(self) -> None:
        while not (self.folder / "end").exists():
            with contextlib.suppress(OSError, ValueError):
                step = int((self.folder / "step").read_text())
                if step > self.saved:
                    self.save(step)
            time.sleep(0.05)


def main() -> None:
    with loop_beside() as loop:
        node = Node(sys.argv[1:], loop)
        if sys.argv[6] == "train":
            agent = node.start_agent()
            node.follow()
            agent.terminate()
            agent.wait(30)
        else:
            backups = node.play_agent()
            node.bring_back(backups)
            node.follow()
            backups.stop()


if __name__ == "__main__":
    main()
