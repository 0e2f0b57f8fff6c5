"""Holds its job's secret and tells of nodes what it likes, as who may make pods in a namespace could have one do.

python false_controller.py RUN_ID NODE [NODE ...]

"""

from __future__ import annotations

import asyncio
import sys
import time

from keepstep import wire
from keepstep.launch.schedulers.kubernetes import PORT


async def main(run_id: str, nodes: list[str]) -> None:
    began_s = time.time() + 1
    faults = [wire.FaultyNode(one, "hardware", at, began_s, "it is bad") for at, one in enumerate(nodes, 1)]

    def message(connection: wire.Connection, said: wire.Message) -> None:
        if isinstance(said, wire.Look):
            connection.send(wire.Overview("running", 1, 1, 7, faults=tuple(faults)))

    callbacks = wire.ServerCallbacks(message=message, opened=lambda _: None, closed=lambda *_: None)
    key = wire.RunKey(wire.read_secret("/etc/keepstep/secret"), run_id)
    await wire.serve("0.0.0.0", PORT, key, callbacks)
    print("it serves", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    wire.run(main(sys.argv[1], sys.argv[2:]))
