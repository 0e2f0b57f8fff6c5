"""native/signal_senders.cpp"""

def watch(number: int, /) -> bool:
    """Note from now on who sends this signal, before Python's handler for it is called.

    To be called again after each ``signal.signal``, which replaces our handler.

    Returns:
        Whether it does so; not for a signal that Python does not handle.

    Raises:
        ValueError: there is no such signal.
        OSError: the kernel refuses.
    """

def sender(number: int, /) -> tuple[int, int, int] | None:
    """``si_code``, ``si_pid`` and ``si_uid`` of who has sent this signal last; None: nobody has."""
