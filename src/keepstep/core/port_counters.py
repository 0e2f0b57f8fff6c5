"""What ports of InfiniBand and RoCE count."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PortCounts:
    """How much the counters of one port grew within ``seconds``.

    Attributes:
        sent_bytes, received_bytes: data on the link.
        retransmitted: packets lost or out of order, acknowledgements that did not come, retries.
        marked: signs of congestion: packets marked by switches (ECN), notifications of it sent and obeyed (CNP).
        waited: ticks, of a length of the port's own, in which it had data and its peer gave no room.
        damaged: symbols and packets received damaged, recoveries of the link.
        downs: how often the link went down.
    """

    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    retransmitted: int = 0
    marked: int = 0
    waited: int = 0
    damaged: int = 0
    downs: int = 0

    def plus(self, other: PortCounts) -> PortCounts:
        """Both spans together."""
        return PortCounts(
            self.seconds + other.seconds,
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            self.retransmitted + other.retransmitted,
            self.marked + other.marked,
            self.waited + other.waited,
            self.damaged + other.damaged,
            self.downs + other.downs,
        )


@dataclass(frozen=True, slots=True)
class PortTraffic:
    """What one port of a node counted before and after a step.

    ``port``: the device and the number of the port, ``mlx5_0/1``. ``is_up``: its link is active now.
    """

    node: str
    port: str
    before: PortCounts
    after: PortCounts
    is_up: bool = True

    @property
    def went_down(self) -> bool:
        """Whether its link was in use before the step and went down after it."""
        used = self.before.sent_bytes + self.before.received_bytes > 0
        return used and (self.after.downs > 0 or not self.is_up)
