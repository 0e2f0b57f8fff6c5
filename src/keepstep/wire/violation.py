"""Errors of peers that are refused. Each has a reason, under which it is counted in ``status.json``."""

from __future__ import annotations

from typing import Literal, get_args

from keepstep.core.errors import AuthenticationError, WireError
from keepstep.wire.secret import UNNAMED

Reason = Literal[
    "malformed",  # the peer sent bytes that are no message of its role in this state
    "oversized",  # the peer announced a frame longer than the state allows
    "unauthenticated",  # the peer brought no proof, or a wrong one, that it holds the run's secret
    "another-job",  # the peer holds the secret, but belongs to a run with another id
    "tampered",  # the code of a sealed frame does not fit its bytes
    "replayed",  # a sealed frame came twice
    "reordered",  # a sealed frame came before others that should precede it
    "version",  # the peer speaks another version of the protocol
    "address",  # the peer sees other addresses than this end does (a relay, or translated addresses)
    "handshake-timeout",  # the peer did not finish the handshake in time
    "crowded-out",  # the connection was the oldest of too many without proof
    "slow-reader",  # the peer does not read what it is sent
    "denied",  # the server refused this client
    "lost",  # the connection broke
]

REASONS: tuple[Reason, ...] = get_args(Reason)


class Violation(WireError):
    """A peer broke the protocol. ``reason`` is the word under which this is counted."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class Unproven(Violation, AuthenticationError):
    """A peer did not prove that it holds the run's secret."""


def left_without_proof() -> Unproven:
    """The refusal of a peer that closed its connection before the handshake was done."""
    return Unproven("unauthenticated", "left without a proof: holds another secret, or none")


class AnotherJob(Violation):
    """Both ends have proved that they hold the secret, but their runs have different ids.

    ``theirs`` and ``ours`` are the names of the two runs.
    """

    def __init__(self, peer: str, theirs: str, ours: str) -> None:
        super().__init__("another-job", f"{peer} belongs to {job_named(theirs)}, this is {job_named(ours)}")
        self.theirs, self.ours = theirs, ours


def job_named(name: str) -> str:
    """The job with this id, as messages name it."""
    return "a job without --rdzv-id" if name == UNNAMED else f"job {name!r}"
