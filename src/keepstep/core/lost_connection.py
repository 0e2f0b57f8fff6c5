"""Tells errors about another process that has gone from errors about what went wrong in this one."""

from __future__ import annotations

import re

_OF_ANOTHER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by (the )?(remote )?peer|broken pipe|socket (was )?closed"
    r"|processgroup|gloo/transport|nccl (communicator|error|remote)|remote (process|peer)|distbackenderror"
    r"|watchdog|timed out (waiting|initializing)|store->get|heartbeat|recvvalue|connectfullmesh|end ?of ?file",
    re.IGNORECASE,
)


def tells_of_another(message: str) -> bool:
    """Whether an error's message is about a lost connection, hence about another process."""
    return _OF_ANOTHER.search(message) is not None
