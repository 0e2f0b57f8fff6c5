"""How the operator asks a job: over the job's own wire, with its secret, as a client that only looks."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
import ssl
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from keepstep import wire
from keepstep.core.errors import UsageError
from keepstep.core.log_lines import one_line
from keepstep.core.within import within
from keepstep.launch.schedulers.kubernetes import PORT

_ANSWER_S = 3.0
_MOST_TRIES = 4  # addresses in one round; others come in the next ones
_LEAST_BYTES, _MOST_BYTES = 32, 2048
TLS_KEYS = ("tls.crt", "tls.key", "ca.crt")
"""Keys of a Secret with a certificate, as Kubernetes and cert-manager call them."""

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


def certificate_in(data: object) -> ssl.SSLContext:
    """The certificate in the ``data`` of a Secret, to show to a job. Raises UsageError where none can be used."""
    texts: dict[str, object] = data if isinstance(data, dict) else {}  # pyright: ignore[reportUnknownVariableType]
    if missing := [name for name in TLS_KEYS if not isinstance(texts.get(name), str)]:
        raise UsageError(f"it has no {', '.join(missing)}")
    try:
        files = [base64.b64decode(str(texts[name]), validate=True) for name in TLS_KEYS]
        if b"ENCRYPTED" in files[1]:
            raise UsageError("it has an encrypted tls.key")  # nobody is there to be asked for the password
        with ExitStack() as stack:
            return wire.client_context(wire.TlsPaths(*[stack.enter_context(_as_file(one)) for one in files]))
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"its {', '.join(TLS_KEYS)} cannot be read: {error}") from None
    except UsageError as error:
        raise UsageError(str(error.__cause__ or error)) from None


@contextmanager
def _as_file(content: bytes) -> Generator[str]:
    """A path at which the content lies, and on no disk."""
    descriptor = os.memfd_create("keepstep-tls", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class Asked:
    """One job's controller, which is in one of its pods, and may move to another."""

    def __init__(self, port: int = PORT) -> None:
        self.port = port
        self._last: tuple[str, int] | None = None  # where it answered last
        self._turn = 0
        self._asked: set[str] = set()  # addresses, since the job was heard last
        self.trouble = ""  # why there is no answer

    async def ask(
        self, addresses: Sequence[str], secret: bytes, run_id: str, tls: ssl.SSLContext | None = None
    ) -> wire.Overview | None:
        """How the job stands. ``addresses``: of its pods, the likeliest first; None where nobody answers.

        A controller that waits to begin answers for the job only once all others have been asked: the job may be there.
        """
        found: wire.Overview | None = None
        key, self.trouble = wire.RunKey(secret, run_id), ""
        self._asked &= set(addresses)
        for address in self._candidates(addresses):
            self._asked.add(address[0])
            answer = await self._one(address, key, tls)
            if isinstance(answer, wire.Moved):
                # Only to a pod of the job: the secret proves who says so, and not that it is right.
                elsewhere = (answer.address, answer.port)
                answer = await self._one(elsewhere, key, tls) if answer.address in addresses else None
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
        usual = [(one, self.port) for one in addresses]
        self._turn += 1
        others = [usual[(self._turn + more) % len(usual)] for more in range(len(usual))] if usual else []
        wanted = [*([self._last] if self._last else []), *usual[:1], *others]
        return list(dict.fromkeys(wanted))[:_MOST_TRIES]

    async def _one(
        self, address: tuple[str, int], key: wire.RunKey, tls: ssl.SSLContext | None
    ) -> wire.Message | None:
        said: asyncio.Queue[wire.Message] = asyncio.Queue()
        failed: asyncio.Queue[Exception] = asyncio.Queue()
        client = wire.Client(
            address,
            key,
            role="client",
            greet=lambda: [wire.Hello("client", os.uname().nodename, -1, os.getpid()), wire.Look()],
            message=lambda message: (
                said.put_nowait(message) if isinstance(message, wire.Overview | wire.Moved) else None
            ),
            trouble=lambda error, _: failed.put_nowait(error),
            tls=tls,
        )
        waits = [asyncio.ensure_future(said.get()), asyncio.ensure_future(failed.get())]
        try:
            with suppress(asyncio.TimeoutError):
                await within(_ANSWER_S, asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))
            if waits[0].done():
                return waits[0].result()  # pyright: ignore[reportReturnType]
            why = waits[1].result() if waits[1].done() else f"no answer in {_ANSWER_S:g} s"
            if not self.trouble or not isinstance(
                why, ConnectionRefusedError
            ):  # most pods have no controller
                self.trouble = one_line(f"{address[0]}:{address[1]}: {why}")
            return None
        finally:
            for one in waits:
                one.cancel()
            await client.close()
