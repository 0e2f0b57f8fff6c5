"""What senders have in common: why a message did not arrive, whether to try again, and an end to waiting."""

from __future__ import annotations

import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

_SOON_S = 0.02


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
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return "the connection was closed" if isinstance(error, (EOFError, OSError)) else type(error).__name__


class Deadline:
    """Cuts a connection off after a time, however slowly the other side sends: a timeout of a socket starts anew with
    each byte."""

    def __init__(self) -> None:
        self.has_passed = False
        self._until_s = math.inf

    def words_of(self, error: Exception, seconds: float) -> str:
        """Why it failed, after ``seconds`` at most."""
        # The socket's own timeout, which smtplib calls a lost connection, may come first.
        late = (
            self.has_passed or isinstance(error, TimeoutError) or time.monotonic() >= self._until_s - _SOON_S
        )
        return f"no answer within {seconds:g} s" if late else words_of(error)

    @contextmanager
    def within(self, seconds: float, connected: Callable[[], socket.socket | None]) -> Generator[None]:
        """Run the block; after ``seconds`` the socket that ``connected`` gives is shut down."""

        def cut() -> None:
            self.has_passed = True
            if (found := connected()) is not None:
                with suppress(OSError):
                    found.shutdown(socket.SHUT_RDWR)

        self._until_s = time.monotonic() + seconds
        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
