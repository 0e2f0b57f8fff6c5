"""Messages between launchers that elect the controller's node. docs/design/election.md describes the protocol."""

from __future__ import annotations

from keepstep.wire.messages import Host, Message, Port, Term, Token


class Ask(Message, frozen=True):
    """A launcher asks another one for the lease on the controller, or to renew it. Answered by `Answer`.

    ``previous``: term of the lease that the sender has, 0 for none. ``held``: term and version of the sender's council.
    ``address`` and ``port``: where the sender's controller listens, once it has one.
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
    """Whether the lease is granted, starting when it was asked for. ``term``: the newest term with a granted lease."""

    number: Term
    by: Token
    granted: bool
    term: Term


class Where(Message, frozen=True):
    """Asks where the controller is. Answered by `Leads`."""


class Leads(Message, frozen=True):
    """The newest controller that the sender knows of; ``port`` 0: none.

    ``acts``: the controller is beside the sender, which has the lease.
    """

    term: Term
    address: Host = ""
    port: Port = 0
    acts: bool = False


ToElector = Ask | Where
FromElector = Answer | Leads
