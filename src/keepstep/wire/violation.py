"""Why a peer was refused: one word per reason, counted per reason and shown in ``status.json``."""

from __future__ import annotations

from typing import Literal, get_args

from keepstep.core.errors import AuthenticationError, WireError
from keepstep.wire.secret import UNNAMED

Reason = Literal[
    "malformed",  # bytes that are no message of this role in this state
    "oversized",  # a frame longer than the state allows
    "unauthenticated",  # no proof, or a wrong one, that the peer holds the run's secret
    "another-job",  # holds the secret, and belongs to a run with another id
    "tampered",  # a sealed frame whose code does not fit its bytes
    "replayed",  # a sealed frame that was received before
    "reordered",  # a sealed frame that skips others
    "version",  # another version of the protocol
    "address",  # the peer means another connection than this one (a relay, or translated addresses)
    "handshake-timeout",  # opened a connection and did not finish the handshake in time
    "crowded-out",  # oldest of too many connections without proof
    "slow-reader",  # does not read what it is sent
    "denied",  # the server said no (seen by clients)
    "lost",  # the connection broke
]

REASONS: tuple[Reason, ...] = get_args(Reason)


class Violation(WireError):
    """A peer broke the protocol. ``reason`` is the word it is counted under."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class Unproven(Violation, AuthenticationError):
    """A peer did not prove that it holds the run's secret."""


class AnotherJob(Violation):
    """Both ends hold the secret and have proved it, and their runs have different ids: there is no connection.

    ``theirs`` and ``ours`` are the names of the two runs.
    """

    def __init__(self, peer: str, theirs: str, ours: str) -> None:
        super().__init__("another-job", f"{peer} belongs to {job_named(theirs)}, this is {job_named(ours)}")
        self.theirs, self.ours = theirs, ours


def job_named(name: str) -> str:
    """A job for a message, by its id."""
    return "a job without --rdzv-id" if name == UNNAMED else f"job {name!r}"
