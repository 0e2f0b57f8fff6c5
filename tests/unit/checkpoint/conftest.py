"""A cache served as the launcher serves it, from an event loop of its own; and the copy engine or its twin."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from tests.twins.checkpoint import python_native

from keepstep.checkpoint import _native, native  # pyright: ignore[reportMissingModuleSource]
from keepstep.checkpoint.memory.cache import Backing, Cache
from keepstep.checkpoint.memory.cache_server import CacheServer
from keepstep.checkpoint.memory.cached_states import CachedStates
from keepstep.checkpoint.restore.restore_service import RestoreServer, RestoreService, restore_address


@pytest.fixture(params=["native", "twin"])
def copy_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What copies and sums in this test: the compiled module, or its twin in plain Python."""
    if request.param == "twin":
        for name in (name for name in vars(_native) if not name.startswith("_")):
            monkeypatch.setattr(native, name, getattr(python_native, name))


@dataclass
class Served:
    cache: Cache
    address: str
    said: list[str]


@contextmanager
def serving(limit_bytes: int = 1 << 30, backing: Backing | None = None) -> Iterator[Served]:
    """Such a cache."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> CacheServer:
        return CacheServer(cache, said.append)

    said: list[str] = []
    cache = Cache(limit_bytes, backing)
    server = asyncio.run_coroutine_threadsafe(begin(), loop).result()

    async def end() -> None:
        server.close()
        cache.close()

    try:
        yield Served(cache, server.address, said)
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    """Such a cache."""
    with serving() as one:
        yield one


@pytest.fixture
def empty_service(served: Served) -> Iterator[None]:
    """An agent's service with nothing to offer, for ranks 0 to 3."""
    states = CachedStates(served.address, range(4))
    server = RestoreServer(restore_address(served.address), RestoreService(range(4), [], states))
    server.start()
    yield
    server.stop()
    states.close()
