"""One question to the controller of a run, and its answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from typing import TypeVar

from keepstep import wire
from keepstep.core.errors import RunError
from keepstep.core.within import within
from keepstep.traces import open_run
from keepstep.view.controller_of import controller_of

Answer = TypeVar("Answer", bound=wire.Message)

_LOOK_S = 0.5  # longest wait for an answer before the connection is looked at


def ask(
    name: str, question: wire.Message, kind: type[Answer], timeout_s: float, *, only: str, gone: str
) -> Answer:
    """Ask the controller of the run ``name`` a question; returns its answer of this ``kind``.

    ``only`` and ``gone`` end error messages: what needs a running job, and what to do when the controller goes away.
    Raises RunError where there is no controller, it refuses, or does not answer in time.
    """
    logging.getLogger("keepstep.wire").addHandler(logging.NullHandler())  # the error raised says it
    controller = controller_of(open_run(name), name, only)
    hello = wire.Hello("client", os.uname().nodename, -1, os.getpid())
    trouble: list[Exception] = []  # why connecting failed, the newest last

    async def answer() -> Answer:
        said: asyncio.Queue[wire.Message] = asyncio.Queue()
        client = wire.Client(
            controller.host_and_port,
            controller.key,
            role="client",
            greet=lambda: [hello],
            message=said.put_nowait,
            trouble=lambda error, _: trouble.append(error),
            tls=controller.tls,
        )
        try:
            client.send(question)
            until_s = time.monotonic() + timeout_s
            connected = False
            while time.monotonic() < until_s:
                with contextlib.suppress(asyncio.TimeoutError):
                    message = await within(_LOOK_S, said.get())
                    if isinstance(message, kind):
                        return message
                    if isinstance(message, wire.Refused):
                        raise RunError(f"{name}: the controller refuses: {message.reason}")
                if trouble and isinstance(trouble[-1], wire.AnotherJob):
                    raise RunError(
                        f"{name}: its controller is not at {controller.address} any more, which runs "
                        f"{wire.job_named(trouble[-1].theirs)}; {gone}"
                    )
                if connected and not client.connected:
                    raise RunError(f"{name}: the controller went away; {gone}")
                connected = client.connected
        finally:
            await client.close()
        seen = str(trouble[-1]) if trouble else "connected, but no outcome came"
        raise RunError(
            f"{name}: no answer from the controller at {controller.address} in {timeout_s:g} s: {seen}"
        )

    return wire.run(answer())
