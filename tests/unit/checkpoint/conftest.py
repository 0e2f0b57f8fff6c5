"""A cache served as the launcher serves it, from an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from keepstep.checkpoint.cache import Backing, Cache, CacheServer


@dataclass
class Served:
    cache: Cache
    address: str


@contextmanager
def serving(limit_bytes: int = 1 << 30, backing: Backing | None = None) -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> CacheServer:
        return CacheServer(cache)

    cache = Cache(limit_bytes, backing)
    server = asyncio.run_coroutine_threadsafe(begin(), loop).result()

    async def end() -> None:
        server.close()
        cache.close()

    try:
        yield Served(cache, server.address)
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as made:
        yield made
