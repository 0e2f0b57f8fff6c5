"""How the operator asks a job: over the job's own wire, with its secret, as a client that only looks."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
from collections.abc import Sequence
from contextlib import suppress

from keepstep import wire
from keepstep.core.log_lines import one_line
from keepstep.core.within import within
from keepstep.launch.schedulers.kubernetes import PORT

_ANSWER_S = 3.0
_MOST_TRIES = 4  # addresses in one round; others come in the next ones
_LEAST_BYTES, _MOST_BYTES = 32, 2048

logging.getLogger("keepstep.wire").addHandler(logging.NullHandler())  # what goes wrong is in the job's status


def secret_in(data: object) -> bytes:
    """The secret in the ``data`` of a Secret; empty where there is none."""
    text = data.get("secret") if isinstance(data, dict) else None  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    if not isinstance(text, str):
        return b""
    try:
        secret = bytes.fromhex(base64.b64decode(text, validate=True).decode("ascii").strip())
    except (binascii.Error, ValueError):
        return b""
    return secret if _LEAST_BYTES <= len(secret) <= _MOST_BYTES else b""


class Asked:
    """One job's controller, which is in one of its pods, and may move to another."""

    def __init__(self, port: int = PORT) -> None:
        self._port = port
        self._last: tuple[str, int] | None = None  # where it answered last
        self._turn = 0
        self._asked: set[str] = set()  # addresses, since the job was heard last
        self.trouble = ""  # why there is no answer

    async def ask(self, addresses: Sequence[str], secret: bytes, run_id: str) -> wire.Overview | None:
        """How the job stands. ``addresses``: of its pods, by index; None where nobody answers.

        A controller that waits to begin answers for the job only once all others have been asked: the job may be there.
        """
        found: wire.Overview | None = None
        self._asked &= set(addresses)
        for address in self._candidates(addresses):
            self._asked.add(address[0])
            answer = await self._one(address, secret, run_id)
            if isinstance(answer, wire.Moved):
                # Only to a pod of the job: the secret proves who says so, and not that it is right.
                elsewhere = (answer.address, answer.port)
                answer = await self._one(elsewhere, secret, run_id) if answer.address in addresses else None
                address = elsewhere
            if isinstance(answer, wire.Overview):
                self.trouble = ""
                if answer.state != "created":
                    self._last = address
                    self._asked.clear()
                    return answer
                found = found or answer
        if found is not None and not self._asked.issuperset(addresses):
            self.trouble = "a controller waits to begin, and not all pods have been asked yet"
            return None
        return found

    def _candidates(self, addresses: Sequence[str]) -> list[tuple[str, int]]:
        """The last one and the first pod's, and some others in turn."""
        if self._last is not None and self._last[0] not in addresses:
            self._last = None
        usual = [(one, self._port) for one in addresses]
        self._turn += 1
        others = [usual[(self._turn + more) % len(usual)] for more in range(len(usual))] if usual else []
        wanted = [*([self._last] if self._last else []), *usual[:1], *others]
        return list(dict.fromkeys(wanted))[:_MOST_TRIES]

    async def _one(self, address: tuple[str, int], secret: bytes, run_id: str) -> wire.Message | None:
        said: asyncio.Queue[wire.Message] = asyncio.Queue()
        failed: asyncio.Queue[Exception] = asyncio.Queue()
        client = wire.Client(
            address,
            wire.RunKey(secret, run_id),
            role="client",
            greet=lambda: [wire.Hello("client", os.uname().nodename, -1, os.getpid()), wire.Look()],
            message=lambda message: (
                said.put_nowait(message) if isinstance(message, wire.Overview | wire.Moved) else None
            ),
            trouble=lambda error, _: failed.put_nowait(error),
        )
        waits = [asyncio.ensure_future(said.get()), asyncio.ensure_future(failed.get())]
        try:
            with suppress(asyncio.TimeoutError):
                await within(_ANSWER_S, asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))
            if waits[0].done():
                return waits[0].result()  # pyright: ignore[reportReturnType]
            why = str(waits[1].result()) if waits[1].done() else f"no answer in {_ANSWER_S:g} s"
            self.trouble = one_line(f"{address[0]}:{address[1]}: {why}")
            return None
        finally:
            for one in waits:
                one.cancel()
            await client.close()
