"""Where a rank's process hands what torch's flight recorder holds to the agent of its node."""

from __future__ import annotations

import hashlib

TELL_CALLS, TIME_CALLS = b"?", b"t"
"""Questions of the agent: what the recorder holds, and to have it note from now on when a device begins a call."""


def address_of(run_dir: str, process: int) -> str:
    """The address of a process of the run with this folder, for `keepstep.core.local_socket`."""
    return f"keepstep-calls-{hashlib.blake2b(run_dir.encode(), digest_size=8).hexdigest()}-{process}"
