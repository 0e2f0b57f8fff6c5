"""What a virtual job is made of: hosts, their controllers, and the connections between them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from keepstep import wire
from keepstep.control.controller import Controller
from keepstep.control.effects import StorePlacement
from keepstep.launch.controller.lease import Elector
from keepstep.launch.controller.member import Member

DEAD_HOST_S = 3.0  # until the kernel closes a connection to a host that does not answer
ATTEMPT_S = 5.0
RANKS = 2  # of a node


@dataclass(eq=False)
class Connection:
    """One connection; both sides have their own idea of whether it stands."""

    number: int
    role: str
    host: Host
    site: Site
    up: bool = True
    here: bool = True  # the launcher's or agent's side
    there: bool = True  # the controller's
    to_controller: deque[wire.Message] = field(default_factory=deque[wire.Message])
    to_node: deque[wire.Message] = field(default_factory=deque[wire.Message])


@dataclass(eq=False)
class Site:
    """A controller's process, and those that come after it on the same host in the same term."""

    host: Host
    term: int
    controller: Controller
    up: bool = True
    over: bool = False  # its launcher does not start it any more
    peers: dict[int, Connection] = field(default_factory=dict[int, Connection])
    stored: StorePlacement | None = None
    stopped: wire.Stop | None = None
    council: wire.Council | None = None
    written: dict[int, object] = field(default_factory=dict[int, object])
    stalled_until_s: float = 0.0


@dataclass(eq=False)
class Host:
    """A launcher, its workers and its agent."""

    name: str
    pid: int
    part: Member
    elector: Elector  # idle where the controller stays where it is
    alive: bool = True
    cut: bool = False
    cut_s: float = 0.0
    deaf: bool = False  # does not reach the controller beside it
    connection: Connection | None = None
    agent: Connection | None = None
    queue: list[wire.Message] = field(default_factory=list[wire.Message])  # sent without a connection
    failures: int = 0
    running: int = -1  # incarnation of the workers that run
    ending: bool = False
    aims: int = 1  # at the controller of this term
    starting: bool = False  # the controller, after an election
    healthy: bool = True  # workers have neither failed nor finished
    finished: bool = False
    by_itself: bool = False  # ended its workers because it is cut off
    exit_code: int | None = None
    gone_s: float = math.inf
    healed_s: float = -math.inf
    unled: bool = False  # no controller was there then
    site: Site | None = None  # the controller beside it

    def reaches(self, site: Site) -> bool:
        """Whether there is a way to this controller."""
        return not self.deaf if site.host is self else not (self.cut or site.host.cut)

    def was_cut(self, now_s: float) -> bool:
        """Until a moment ago: it does not know yet that it was replaced."""
        return self.cut or self.deaf or now_s - self.healed_s < ATTEMPT_S + 15.0
