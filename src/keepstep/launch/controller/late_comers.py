"""Launchers that begin after the controller has moved, and know only the address where the job began.

A pod that comes in the place of the first one starts a controller there, as the first one did. The host of the job's
own controller looks there now and then, and tells it where the job is.
"""

from __future__ import annotations

import asyncio
import os

from keepstep import wire
from keepstep.core.errors import RunError
from keepstep.launch.controller.connection import contexts
from keepstep.launch.controller.late_names import addresses_of
from keepstep.launch.local_run import LocalRun

_LOOK_S = 3.0
_TELL_S = 2.0  # seconds in which what is at the address can be connected and told


async def tell_late_comers(run: LocalRun, moved: wire.Moved) -> None:
    """Go on telling launchers that come to the job's first address where its controller is; ends when cancelled."""
    endpoint = run.job.rendezvous.endpoint
    assert endpoint is not None
    key = wire.RunKey(wire.read_secret(run.secret), run.job.run_id)
    hello = wire.Hello("client", run.job.node, -1, os.getpid())
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            address = (await addresses_of(endpoint.host))[0]
        except RunError:
            continue
        client = wire.Client(
            (address, endpoint.port),
            key,
            role="client",
            greet=lambda: (hello, moved),
            message=lambda _: None,
            tls=contexts(run.job)[1],
        )
        try:
            await asyncio.sleep(_TELL_S)
        finally:
            await client.close()
