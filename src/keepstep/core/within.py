"""A wait with a time limit that never loses a cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Wait for ``work``, which is cancelled when it takes longer. Raises asyncio.TimeoutError then.

    Up to Python 3.11 ``asyncio.wait_for`` returns the result, and the cancellation is lost, where its caller is
    cancelled in the same turn of the loop in which the work is done.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.wait([task])  # until it has let go of what it holds
        if not task.cancelled():
            return task.result()
    finally:
        task.cancel()
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # else asyncio logs it
    raise asyncio.TimeoutError
