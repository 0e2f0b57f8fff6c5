"""Where a rank's process hands what torch's flight recorder holds to the agent of its node."""

from __future__ import annotations

import hashlib

CALLS, TIMES = "calls", "times"
"""Questions of the agent: what the recorder holds, and to have it note from now on when a device begins a call."""

MOST_BYTES = 32 << 20
"""Of an answer; torch keeps 2000 calls of half a kilobyte each by default."""


def address_of(question: str, run_dir: str, process: int) -> str:
    """Where a process of the run with this folder is asked this, for `keepstep.core.local_socket`.

    Who connects has asked.
    """
    return f"keepstep-{question}-{hashlib.blake2b(run_dir.encode(), digest_size=8).hexdigest()}-{process}"
