"""A server in a process that has hardly any descriptors left: ``python server_without_room.py LOOP SECONDS``.

Prints its port; for a line on standard input, when connections have come, how much CPU it takes in so many seconds;
then how many peers have proved themselves within 20 s.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time

from keepstep import wire
from keepstep.core import descriptors

KEY = wire.RunKey(b"s" * 32, "job-a")
LEFT = 20


async def main(seconds: float) -> None:
    opened: list[wire.Connection] = []
    callbacks = wire.ServerCallbacks(lambda _, __: None, opened.append, lambda _, __: None)
    unbounded = wire.ServerLimits(descriptors=1 << 20, handshake_s=60)
    server = await wire.serve("127.0.0.1", 0, KEY, callbacks, limits=unbounded)
    now, (_, hard) = descriptors.open_now(), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (now + LEFT, hard))
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    began_s, before_s = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    share = (time.process_time() - before_s) / (time.monotonic() - began_s)
    print(json.dumps([round(share, 3), server.unproven]), flush=True)
    for _ in range(2000):
        if opened:
            break
        await asyncio.sleep(0.01)
    print(len(opened), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "uvloop":
        wire.run(main(float(sys.argv[2])))
    else:
        asyncio.run(main(float(sys.argv[2])))
