"""What launchers say to each other where the controller may move: see docs/design/election.md."""

from __future__ import annotations

from keepstep.wire.messages import Host, Message, Port, Term, Token


class Ask(Message, frozen=True):
    """A launcher asks another one for the lease on the controller, or to renew it. Answered by `Answer`.

    ``previous``: term of the lease that it has, 0 for none. ``held``: term and version of its council. ``address`` and
    ``port``: of its controller, once it has one.
    """

    number: Term
    to: Token
    by: Token
    term: Term
    previous: Term
    held: tuple[Term, Term]
    address: Host = ""
    port: Port = 0


class Answer(Message, frozen=True):
    """Whether the lease is granted, from when it was asked for on. ``term``: the newest in which one was granted."""

    number: Term
    by: Token
    granted: bool
    term: Term


class Where(Message, frozen=True):
    """Where is the controller? Answered by `Leads`."""


class Leads(Message, frozen=True):
    """The newest controller that a launcher knows of; ``port`` 0: none. ``acts``: it is ours, and we have the lease."""

    term: Term
    address: Host = ""
    port: Port = 0
    acts: bool = False


ToElector = Ask | Where
FromElector = Answer | Leads
