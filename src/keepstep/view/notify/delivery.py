"""What senders have in common: why a message did not arrive, whether to try again, and an end to waiting."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress


class NotDeliveredError(Exception):
    """A message did not arrive. The text tells why, without any secret.

    ``is_final``: it would not arrive later either. ``wait_s``: how long the receiver asks us to wait, if it does.
    """

    def __init__(self, why: str, *, is_final: bool = False, wait_s: float | None = None) -> None:
        super().__init__(why)
        self.is_final, self.wait_s = is_final, wait_s


def words_of(error: Exception) -> str:
    """An error of the network in a few words that hold nothing of the address."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message})"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({error.reason or 'cut off'})"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "the connection was closed" if isinstance(error, (EOFError, OSError)) else type(error).__name__


class Deadline:
    """Cuts a connection off after a time, however slowly the other side sends: a timeout of a socket starts anew with
    each byte."""

    def __init__(self) -> None:
        self.has_passed = False

    @contextmanager
    def within(self, seconds: float, connected: Callable[[], socket.socket | None]) -> Generator[None]:
        """Run the block; after ``seconds`` the socket that ``connected`` gives is shut down."""

        def cut() -> None:
            self.has_passed = True
            if (found := connected()) is not None:
                with suppress(OSError):
                    found.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
