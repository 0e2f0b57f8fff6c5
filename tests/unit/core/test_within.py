"""A wait with a time limit: its result, its error, its end, and a cancellation that comes with the result."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from keepstep.core.within import within


def test_the_result_or_the_error_of_the_work_comes_back() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def check() -> None:
        assert await within(60, asyncio.sleep(0, "done")) == "done"
        with pytest.raises(ValueError, match="no"):
            await within(60, fail())

    asyncio.run(check())


def test_work_that_takes_too_long_has_ended_when_the_wait_does() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    async def check() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await within(0.001, work())
        assert ended == ["cleaned up"]

    asyncio.run(check())


@pytest.mark.parametrize("turns", range(6))
def test_no_cancellation_is_lost(turns: int) -> None:
    """``turns``: of the loop between the end of the work and the cancellation."""

    async def check() -> None:
        event = asyncio.Event()
        went_on = False

        async def wait() -> None:
            nonlocal went_on
            with suppress(asyncio.TimeoutError):
                await within(60, event.wait())
            await asyncio.sleep(0)
            went_on = True
            await asyncio.sleep(60)

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0.001)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=5)
        assert task.cancelled()
        assert turns or not went_on

    asyncio.run(check())
