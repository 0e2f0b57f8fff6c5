"""Who is slower than its peers: medians and the spread around them, which hold up to a third of slow peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from keepstep.core.validation import (
    DeviceFigure,
    LinkFigure,
    RankFigures,
    SlowDevice,
    SlowLink,
    Transport,
    Validation,
)

SLOW_SHARE = 0.8  # part of the peers' median below which a figure is slow: a drop by 20 % makes a suspect
# For links inside a node the bar is lower: their speed also depends on the cores that their ends happen to get.
_INSIDE_SHARE = 0.5
_MOST_SLOW = (
    1 / 3
)  # part of links between devices that may be slow; else some go another way (NVLink and PCIe)
_SPREADS = 3.5  # standard deviations by which a slow figure must also lie below the median
_MAD_TO_SIGMA = 1.4826  # from a median absolute deviation to a standard deviation
_TRANSPORTS: tuple[Transport, ...] = ("nccl", "tcp")
_MUCH_TAKEN = 0.3  # part of the test by which a core was taken longer than its neighbours' to be mentioned


def judge(
    ranks: Sequence[int],
    figures: Sequence[RankFigures],
    nodes: Mapping[int, str],
    held_s: float = 0.0,
) -> Validation:
    """The outcome of tests of ``ranks``; ``figures`` may be incomplete. ``nodes``: node name by rank.

    Devices are compared by test, links with links of their kind (inside a node, between nodes; how they were tested).
    A link over which nothing came is slow whatever the others are.
    """
    devices: dict[int, SlowDevice] = {}
    for test in dict.fromkeys(one.test for figure in figures for one in figure.devices):
        known = {one.rank: one for figure in figures for one in figure.devices if one.test == test}
        middle, bar = _bar([one.value for one in known.values()])
        for rank, one in known.items():
            if one.value < bar and (rank not in devices or one.value / middle < devices[rank].share):
                devices[rank] = SlowDevice(one, middle, one.value / middle)
    # A rank that gets too little of the processor to send and receive has slow links for that reason.
    starved = {rank for rank, slow in devices.items() if cause_of(slow) == "cpu quota"}
    links, unlike = _slow_links(figures, nodes, starved)
    reported = {one.rank for one in figures}
    silent = [f"figures of rank {rank}: they did not come in time" for rank in ranks if rank not in reported]
    told = [f"rank {one.rank}: {text}" for one in figures for text in one.missing]
    return Validation(
        ranks=tuple(ranks),
        figures=tuple(replace(one, missing=()) for one in figures),
        devices=tuple(sorted(devices.values(), key=lambda slow: slow.share)),
        links=tuple(sorted(links, key=lambda slow: (slow.share, slow.source, slow.target))),
        missing=(*silent, *told, *unlike, *_taken(figures, nodes)),
        held_s=held_s,
    )


def _slow_links(
    figures: Sequence[RankFigures], nodes: Mapping[int, str], starved: set[int]
) -> tuple[list[SlowLink], list[str]]:
    """Links that are slow beside those of their kind, but not those of ``starved`` ranks; lines on kinds not judged."""
    links: list[SlowLink] = []
    unlike: list[str] = []
    speeds = {pair: speed for pair, speed in link_speeds(figures).items() if not starved.intersection(pair)}
    transports = link_transports(figures)
    for inside, transport in ((inside, transport) for inside in (True, False) for transport in _TRANSPORTS):
        kind = {
            pair: speed
            for pair, speed in speeds.items()
            if (nodes.get(pair[0]) == nodes.get(pair[1])) is inside and transports[pair] == transport
        }
        middle, bar = _bar(list(kind.values()))
        bar = min(bar, _INSIDE_SHARE * middle) if inside and transport == "tcp" else bar
        below = [pair for pair, speed in kind.items() if 0 < speed < bar]
        if transport == "nccl" and len(below) > max(1, len(kind) * _MOST_SLOW):
            where = "inside nodes" if inside else "between nodes"
            unlike.append(
                f"links {where}: they are of several kinds, {len(below)} of {len(kind)} much slower"
            )
            below = []
        dead = [pair for pair, speed in kind.items() if speed == 0]
        for pair in (*below, *dead):
            share = kind[pair] / middle if middle else 0.0
            links.append(SlowLink(*pair, kind[pair], middle, share))
    return links, unlike


def cause_of(slow: SlowDevice) -> str:
    """``cpu quota`` when the rank would be like its peers without it, else ``device``."""
    without = slow.share / max(1.0 - slow.figure.limited, 1e-9)
    return "cpu quota" if slow.figure.limited and without >= SLOW_SHARE else "device"


def best_of(rounds: Sequence[RankFigures]) -> RankFigures:
    """The best figures of one rank over several rounds of the same tests: neighbours may disturb it in some rounds."""
    devices: dict[str, DeviceFigure] = {}
    links: dict[tuple[int, int, str, int, str], LinkFigure] = {}
    for one in rounds:
        for device in one.devices:
            if device.test not in devices or device.value > devices[device.test].value:
                devices[device.test] = device
        for link in one.links:
            key = link.source, link.target, link.topology, link.nbytes, link.transport
            if key not in links or link.bytes_per_s > links[key].bytes_per_s:
                links[key] = link
    missing = min((one.missing for one in rounds), key=len)
    return RankFigures(rounds[0].rank, tuple(devices.values()), tuple(links.values()), missing)


def link_transports(figures: Sequence[RankFigures]) -> dict[tuple[int, int], Transport]:
    """How every link, by (source, target), was tested: between the devices, if it ever was, or over TCP."""
    found: dict[tuple[int, int], Transport] = {}
    for one in (one for figure in figures for one in figure.links):
        if found.get((one.source, one.target)) != "nccl":
            found[one.source, one.target] = one.transport
    return found


def link_speeds(figures: Sequence[RankFigures]) -> dict[tuple[int, int], float]:
    """The best speed of every link over all messages of its transport, bytes per second, by (source, target)."""
    transports = link_transports(figures)
    speeds: dict[tuple[int, int], float] = {}
    for one in (one for figure in figures for one in figure.links):
        pair = one.source, one.target
        if one.transport == transports[pair]:
            speeds[pair] = max(speeds.get(pair, 0.0), one.bytes_per_s)
    return speeds


def _taken(figures: Sequence[RankFigures], nodes: Mapping[int, str]) -> list[str]:
    """Lines on ranks whose core other processes had for much longer than their neighbours': no fault of the device."""
    beside: dict[str, dict[int, float]] = {}
    for figure in figures:
        for one in figure.devices:
            shares = beside.setdefault(nodes.get(one.rank, ""), {})
            shares[one.rank] = max(shares.get(one.rank, 0.0), one.taken)
    found: list[str] = []
    for shares in beside.values():
        usual = median(shares.values())
        found += [
            f"rank {rank}: other processes had its core {share:.0%} of the test (of its peers' {usual:.0%}), "
            "which its figure leaves out"
            for rank, share in sorted(shares.items())
            if share > usual + _MUCH_TAKEN
        ]
    return found


def _bar(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the value below which a figure is slow; 0 for both without peers to compare with.

    Of two values the larger counts as healthy and the smaller as the exception. The spread is that of the upper half,
    in which no figure is slow.
    """
    if len(values) < 2:
        return 0.0, 0.0
    middle = sorted(values)[len(values) // 2]
    spread = _MAD_TO_SIGMA * median(value - middle for value in values if value >= middle)
    return middle, min(SLOW_SHARE * middle, middle - _SPREADS * spread)
