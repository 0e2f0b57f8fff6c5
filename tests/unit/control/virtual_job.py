"""The state of a virtual job, for all who play in it: time, hosts, what was given out and what was ordered."""

from __future__ import annotations

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable

from tests.unit.control.virtual_parts import Connection, Host, Site


class JobState(ABC):
    """What elections and checks see of a job; `virtual_launchers.Job` makes it move."""

    hosts: list[Host]
    head: Host
    """Where the controller runs first; one of ``hosts`` if it can move."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        dice = self.random
        self.nodes = dice.choice((2, 2, 3, 4, 5, 12))
        self.spares = dice.choice((0, 0, 1, 1, 2))
        self.max_restarts = dice.choice((1, 2, 3, 6))
        self.elects = dice.choice((True, True, False))
        # Dice of their own for sizes: a seed from before there were sizes is still played the same.
        sizes = self.dice = random.Random(f"{seed} sizes")
        self.least = sizes.choice((self.nodes, self.nodes, 1, max(1, self.nodes - 1), -(-self.nodes // 2)))
        self.rigid = sizes.choice(("", "", "what rank 0 saves is not known to be the same on all ranks"))
        if self.least < self.nodes:
            self.spares, self.max_restarts = sizes.choice((0, 0, self.spares)), max(2, self.max_restarts)
        self.shrink_s = sizes.choice((0.0, 3.0, 10.0))
        self.seals: set[tuple[int, int]] = set()  # that were asked for so that nodes can be taken in
        self.sizes: dict[int, int] = {}  # nodes by incarnation
        self.now_s = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.given: dict[int, tuple[int, str, int]] = {}  # where rank 0 meets the others, and in which term
        self.leaders: dict[int, Host] = {}  # by term
        self.told: list[str] = []
        self.played: dict[tuple[int, int], Host] = {}  # who started, by incarnation and node rank
        self.newest, self.newest_s = -1, 0.0
        self.disturbances = 0  # that may cost a restart
        self.codes: set[int] = set()
        self.orders = self.pauses = 0  # of operators, and the incarnations that were theirs
        self.settled_s = math.inf  # since when a council is settled
        self.back_s = 0.0  # since when there is a controller that is awake

    @property
    def sites(self) -> list[Site]:
        """The newest of each host."""
        hosts = dict.fromkeys((*self.hosts, self.head))
        return [host.site for host in hosts if host.site is not None]

    def leader(self) -> Site | None:
        """The newest controller, while it runs where others reach it."""
        sites = [site for site in self.sites if site.host.alive]
        site = max(sites, key=lambda site: site.term, default=None)
        return site if site is not None and site.up and not site.host.cut else None

    def at(self, after_s: float, event: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (self.now_s + after_s, self.count, event))

    @abstractmethod
    def start_site(self, host: Host, term: int) -> None:
        """Start a controller of this term on a host."""

    @abstractmethod
    def target(self, host: Host) -> Site | None:
        """The controller that a launcher has to connect to now."""

    @abstractmethod
    def connect(self, host: Host) -> None:
        """Let a launcher try to reach its controller."""

    @abstractmethod
    def break_connection(self, connection: Connection, host: Host, after_s: float = 0.0) -> None:
        """Break a connection; each side notices in its own time."""

    @abstractmethod
    def fail(self) -> None:
        """Let workers of a node, or of two, fail."""

    @abstractmethod
    def end_site(self, host: Host, after_s: float) -> None:
        """End the controller that runs on a host, if one does; the others notice ``after_s`` later."""

    @abstractmethod
    def kill_site(self, site: Site) -> None:
        """Kill a controller's process."""

    @abstractmethod
    def delay_s(self) -> float:
        """How long a message takes."""
