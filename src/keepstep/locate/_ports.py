"""What the counters of InfiniBand and RoCE ports say: which ports lose, wait or went down more than all others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from keepstep.core.port_counters import PortTraffic

# Fields of a port's counts, the graver first, with words for them and how many since the onset are no chance.
_KINDS = (
    ("downs", "link down", 1),
    ("damaged", "damaged packets", 16),
    ("retransmitted", "retransmissions", 16),
    ("marked", "congestion marks", 64),
    ("waited", "ticks of waiting for room", 1 << 16),
)
_TIMES = 3.0  # factor by which a bad port counts more than it did, and than the ports of other nodes


@dataclass(frozen=True, slots=True)
class BadPorts:
    """The nodes whose ports stand out in one kind of counts, worst first: two ends of a link, or one node."""

    nodes: tuple[str, ...]
    evidence: tuple[str, ...]


def bad_ports(ports: Sequence[PortTraffic], among: Collection[str]) -> BadPorts | None:
    """The one node or the two nodes whose ports count losses or congestion far beyond all others'; None for none.

    Both ends of a congested path count: the sender obeys notifications and sends again, the receiver sends these and
    gets packets out of order. More than two nodes that stand out have their cause elsewhere.
    """
    here = [one for one in ports if one.node in among and one.before.seconds > 0 and one.after.seconds > 0]
    nodes = sorted({one.node for one in here})
    for field, words, fewest in _KINDS:
        excess = dict.fromkeys(nodes, 0.0)
        counts = dict.fromkeys(nodes, 0)
        for one in here:
            now, usual = _rate(one, field, after=True), _rate(one, field, after=False)
            if now >= _TIMES * usual:
                excess[one.node] += now - usual
                counts[one.node] += int(getattr(one.after, field))
        order = sorted((node for node in nodes if counts[node] >= fewest), key=lambda node: -excess[node])
        for many in (1, 2):
            rest = [excess[node] for node in nodes if node not in order[:many]]
            if len(order) >= many and rest and excess[order[many - 1]] >= _TIMES * max(rest):
                named = tuple(order[:many])
                lines = tuple(_line(one, field, words) for one in here if one.node in named)
                return BadPorts(named, tuple(filter(None, lines)))
    return None


def port_lines(ports: Sequence[PortTraffic], nodes: Collection[str]) -> tuple[str, ...]:
    """Lines of evidence on the ports of these nodes that went down, lost data, or received it damaged."""
    lines = [
        _line(one, field, words)
        for field, words, fewest in _KINDS[:3]
        for one in ports
        if one.node in nodes and getattr(one.after, field) >= fewest
    ]
    return tuple(filter(None, lines))


def ports_down(ports: Sequence[PortTraffic], nodes: Collection[str]) -> list[PortTraffic]:
    """The ports of these nodes whose link went down."""
    return [one for one in ports if one.node in nodes and one.went_down]


def are_quiet(ports: Sequence[PortTraffic], nodes: Collection[str]) -> bool:
    """Whether ports of all these nodes carried data before, and since then none lost any or went down."""
    used = {one.node for one in ports if one.before.sent_bytes + one.before.received_bytes > 0}
    return (
        bool(nodes)
        and used.issuperset(nodes)
        and not port_lines(ports, nodes)
        and not ports_down(ports, nodes)
    )


def _rate(one: PortTraffic, field: str, *, after: bool) -> float:
    """Counts a second; before the onset 0 where no time was looked at."""
    counts = one.after if after else one.before
    return getattr(counts, field) / counts.seconds if counts.seconds > 0 else 0.0


def _line(one: PortTraffic, field: str, words: str) -> str:
    now, usual = _rate(one, field, after=True), _rate(one, field, after=False)
    if now <= usual:
        return ""
    if field == "downs":
        return f"port {one.port} of {one.node}: link down {one.after.downs} times"
    speeds = " -> ".join(_speed(counts.sent_bytes, counts.seconds) for counts in (one.before, one.after))
    return f"port {one.port} of {one.node}: {words} {usual:.3g} -> {now:.3g} a second; sends {speeds}"


def _speed(nbytes: int, seconds: float) -> str:
    bits = 8 * nbytes / seconds if seconds > 0 else 0.0
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
