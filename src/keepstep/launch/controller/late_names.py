"""The name of the controller's host: known late, or for a while with an old address, where that is a pod.

Pods begin in any order, and a cluster's name server tells for some seconds what it knew before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from keepstep.core.errors import RunError
from keepstep.launch.command import addresses
from keepstep.launch.schedulers.kubernetes import is_pod

_AGAIN_S = 1.0


async def addresses_of(host: str) -> list[str]:
    """As `addresses.resolve`; the event loop goes on meanwhile. Raises RunError where the name is unknown."""
    return await asyncio.get_running_loop().run_in_executor(None, addresses.resolve, host)


async def address_in_time(
    host: str, environ: Mapping[str, str], patience_s: float, say: Callable[[str], None]
) -> str:
    """The numeric address of the controller's host. In a pod the name is waited for; ``say`` is told so once.

    Raises RunError where the name is unknown: at once, in a pod after ``patience_s``.
    """
    loop = asyncio.get_running_loop()
    until_s, is_told = loop.time() + patience_s, False
    while True:
        try:
            return (await addresses_of(host))[0]
        except RunError as error:
            if not is_pod(environ):
                raise
            if loop.time() >= until_s:
                raise RunError(f"{error}; waited {patience_s:g} s for its pod") from None
        if not is_told:
            say(f"{host} is not known yet: its pod is waited for, {patience_s:g} s at most")
            is_told = True
        await asyncio.sleep(_AGAIN_S)
