"""A sealed state from one process to another over loopback, beside a raw TCP stream of as many bytes.

Raw is what the kernel gives to one connection: ``sendfile`` out of a memfd, ``recv_into`` memory that is there, nothing
checked. Ours has the handshake, the header, two connections, and verifies every byte.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.checkpoint.served import served

from keepstep.wire.secret import RunKey

RUN = RunKey(bytes(range(32)))


def giver(mib: int) -> None:
    """In a process of its own: a state in a cache, given by both ways until standard input ends."""
    import torch

    from keepstep.checkpoint.memory.cached_states import CachedStates
    from keepstep.checkpoint.memory.slots import Key
    from keepstep.checkpoint.peers.state_server import state_server
    from keepstep.checkpoint.snapshot import Snapshots, Worker

    with served() as address:
        snapshots = Snapshots(address, Worker(), lambda row: [row])
        state = {f"layer.{i}": torch.rand((mib << 20) // 4 // 16) for i in range(16)}
        snapshots.save(state, 1, overlap=False)
        states = CachedStates(address, [0])
        server = state_server(RUN, states.reading)
        server.listen(["127.0.0.1"])
        listener = socket.create_server(("127.0.0.1", 0))
        with states.reading(Key(0, 1), 0) as (slot, record):

            def stream() -> None:
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        at, end = 4096, 4096 + record.data_bytes
                        while at < end:
                            at += os.sendfile(connection.fileno(), slot.fileno(), at, end - at)

            threading.Thread(target=stream, daemon=True).start()
            told = {
                "port": server.endpoints[0].port,
                "raw": listener.getsockname()[1],
                "bytes": record.data_bytes,
            }
            print(json.dumps(told), flush=True)
            sys.stdin.read()
            os._exit(0)  # a bench's process has nothing to tear down


def pairs(mib: int, repetitions: int) -> dict[str, Any]:
    """Seconds of (ours, raw), one after the other, for a backup and for a fetch into the own cache."""
    from keepstep.checkpoint.memory.cache_server import Reserve, ask
    from keepstep.checkpoint.memory.incoming import Incoming
    from keepstep.checkpoint.memory.slot import Board, Slot, backup_of
    from keepstep.checkpoint.memory.slots import Key, Record, slot_bytes
    from keepstep.checkpoint.peers.fetch import Fetch
    from keepstep.core.summary import Endpoint

    command = [sys.executable, "-m", "benchmarks.checkpoint.transfer", str(mib)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        told = json.loads(process.stdout.readline())
        where = (Endpoint("127.0.0.1", told["port"]),)
        with served() as address, ExitStack() as stack:

            def room_of(owner: int) -> Any:
                answer = ask(address, Reserve(owner, told["bytes"] + (1 << 20), 1))
                board, slot = Board(answer.board), Slot(answer.slots[0], apart=True)
                stack.callback(board.close)
                stack.callback(slot.close)
                slot.populate(threading.Event())

                def room(record: Record) -> Incoming:
                    assert slot_bytes(record) <= slot.nbytes
                    return Incoming(slot, board, owner, 0, record)

                return room

            target = memoryview(bytearray(told["bytes"]))

            def raw() -> float:
                began_s = time.perf_counter()
                with socket.create_connection(("127.0.0.1", told["raw"])) as connection:
                    got = 0
                    while got < len(target):
                        got += connection.recv_into(target[got:], 0, socket.MSG_WAITALL)
                return time.perf_counter() - began_s

            def ours(room: Any) -> float:
                began_s = time.perf_counter()
                Fetch(Key(0, 1), 0, lambda: where, RUN).run(room)
                return time.perf_counter() - began_s

            found: dict[str, Any] = {"bytes": told["bytes"]}
            for name, owner in (("backup", backup_of(0)), ("fetch", 0)):
                room = room_of(owner)
                ours(room)
                raw()
                rows = []
                for number in range(repetitions):
                    row = [0.0, 0.0]
                    for way in (0, 1) if number % 2 else (1, 0):
                        row[way] = raw() if way else ours(room)
                    rows.append(row)
                found[name] = rows
            return found
    finally:
        process.communicate()


if __name__ == "__main__":
    giver(int(sys.argv[1]))
