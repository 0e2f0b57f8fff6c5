"""Does an error tell that another process has gone, rather than what went wrong here?"""

from __future__ import annotations

import re

_OF_ANOTHER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by (the )?(remote )?peer|broken pipe|socket (was )?closed"
    r"|processgroup|gloo/transport|nccl (communicator|error|remote)|remote (process|peer)|distbackenderror"
    r"|watchdog|timed out (waiting|initializing)|store->get|heartbeat|recvvalue|connectfullmesh|end ?of ?file",
    re.IGNORECASE,
)


def tells_of_another(message: str) -> bool:
    """Whether an error's message is about a lost connection."""
    return _OF_ANOTHER.search(message) is not None
