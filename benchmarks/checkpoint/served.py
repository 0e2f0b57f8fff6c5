"""A cache of snapshots as the launcher serves it, in a thread of the process that measures."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def served() -> Iterator[str]:
    """A cache, served as the launcher does; gives its address."""
    from keepstep.checkpoint.memory.cache import Cache
    from keepstep.checkpoint.memory.cache_server import CacheServer

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    cache = Cache(1 << 40)

    async def begin() -> CacheServer:
        return CacheServer(cache)

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result()
    try:
        yield server.address
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        cache.close()
