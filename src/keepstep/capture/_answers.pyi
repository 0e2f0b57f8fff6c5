"""native/device_answers.cpp"""

def answer(listener: int, dumps: tuple[int, ...], most_bytes: int, /) -> bool:
    """Answer whoever connects to this socket with what torch's recorder holds, from a native thread.

    ``dumps``: addresses of functions of C++ that tell it in JSON; the first with calls in it counts. Answers of more
    than ``most_bytes`` are left out. The thread owns the socket then.

    Returns:
        Whether it does so; not without functions.

    Raises:
        OSError: there can be no thread.
        RuntimeError: there was one before, in this process or in a parent that has forked it.
    """

def stop() -> None:
    """Read no recorder from now on. Waits some seconds at most for an answer that is on its way."""

def tell(connection: int, calls: bytes, most_bytes: int, took_us: int, /) -> None:
    """Send the calls, and what they have cost, on the connection of who has asked."""
