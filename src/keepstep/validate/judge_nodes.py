"""Which nodes stand out: by versions, network ports, speeds of paths and devices. Pure; rows may come from others.

What stands out is told, and makes a node unfit only where that is proof: NCCL refuses other versions, keepstep another
torch; a device at less than half the speed of its peers under the same load is no noise. A majority is more than half.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from keepstep.core.node_row import Burnt, NodeRow
from keepstep.core.ranges import fold_nodes
from keepstep.core.validation import RankFigures
from keepstep.validate.judge import judge

# With other versions of these no job is started.
_REFUSED = ("keepstep", "Python", "torch", "NCCL")
UNFIT_SHARE = 0.5  # share of the peers' median below which a device is unfit
_MOST_LINE = 400  # characters
_LEAST_NODES = 3  # with two, nobody can say which of them is the exception


@dataclass(frozen=True, slots=True)
class Stands:
    """A node that stands out, and why, in a line."""

    node: str
    text: str
    is_unfit: bool


def compared(rows: Sequence[NodeRow]) -> tuple[NodeRow, ...]:
    """The rows with what comparing them has found, in the rows of the nodes that stand out."""
    found = [
        *_versions(rows),
        *_gpus(rows),
        *_ports(rows),
        *_paths(rows),
        *slow_devices({row.node: row.burnt for row in rows}),
    ]
    return tuple(with_lines(row, (one for one in found if one.node == row.node)) for row in rows)


def with_lines(row: NodeRow, found: Iterable[Stands]) -> NodeRow:
    """The row with these lines; one that it has already is left out."""
    known = {*row.unfit, *row.warnings}
    new = [one for one in found if one.text not in known]
    return replace(
        row,
        unfit=(*row.unfit, *(one.text for one in new if one.is_unfit)),
        warnings=(*row.warnings, *(one.text for one in new if not one.is_unfit)),
    )


def slow_devices(burnt: Mapping[str, Sequence[Burnt]]) -> Iterator[Stands]:
    """Devices below their peers of the same model, which may be on one node or on several."""
    places = [(node, one) for node, devices in burnt.items() for one in devices if one.figures]
    for model in dict.fromkeys(one.model for _, one in places):
        alike = [(node, one) for node, one in places if one.model == model]
        numbers = range(len(alike))
        figures = [
            RankFigures(
                number,
                tuple(
                    replace(figure, rank=number)
                    for figure in one.figures
                    if math.isfinite(figure.value) and figure.value > 0
                ),
            )
            for number, (_, one) in zip(numbers, alike, strict=True)
        ]
        for slow in judge(numbers, figures, {}).devices:
            node, one = alike[slow.figure.rank]
            yield Stands(
                node,
                f"node {node}: {one.device} ({one.model}): {slow.figure.test} at {_short(slow.figure.value)} "
                f"{slow.figure.unit}, its peers' median is {_short(slow.median)}; look at its clock and temperature",
                slow.share < UNFIT_SHARE and len(alike) >= _LEAST_NODES,
            )


def unlike(have: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """What most nodes have and the nodes without it; ("", all nodes) without a majority. ``have``: by node."""
    if len(set(have.values())) < 2:
        return next(iter(have.values()), ""), ()
    value, count = Counter(have.values()).most_common(1)[0]
    if 2 * count <= len(have):
        return "", tuple(have)
    return value, tuple(node for node, one in have.items() if one != value)


def differences(have: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """A line for each software that is not the same on all nodes, and the nodes that have another version than most.

    ``have``: by node, as ``driver 570.86.15``.
    """
    versions: dict[str, dict[str, str]] = {}
    for node, texts in have.items():
        parts = [text.rpartition(" ") for text in texts]
        versions[node] = {name: version for name, _, version in parts}
    found: dict[str, tuple[str, ...]] = {}
    for name in dict.fromkeys(name for one in versions.values() for name in one):
        of = {node: one.get(name, "none") for node, one in versions.items()}
        usual, odd = unlike(of)
        if not odd:
            continue
        told = [
            f"{value} on {fold_nodes(node for node in odd if of[node] == value)}"
            for value, _ in Counter(of[node] for node in odd).most_common(4)
        ]
        told += [f"{usual} on the {len(of) - len(odd)} others"] if usual else []
        found[f"{name} is not the same on all nodes: {', '.join(told)}"[:_MOST_LINE]] = odd
    return found


def _versions(rows: Sequence[NodeRow]) -> Iterator[Stands]:
    for name in dict.fromkeys(name for row in rows for name, _ in row.versions):
        have = {row.node: dict(row.versions).get(name, "none") for row in rows}
        usual, odd = unlike(have)
        grave = name in _REFUSED
        for node in odd:
            others = f"{usual} on the {len(rows) - len(odd)} others" if usual else _counted(have, node)
            yield Stands(
                node, f"node {node}: {name} {have[node]}, but {others}; install the same on all nodes", grave
            )


def _gpus(rows: Sequence[NodeRow]) -> Iterator[Stands]:
    have = {row.node: f"{len(row.gpus)} GPUs" for row in rows}
    usual, odd = unlike(have)
    for node in odd:
        others = f"{usual} on the {len(rows) - len(odd)} others" if usual else _counted(have, node)
        yield Stands(node, f"node {node}: {have[node]}, but {others}; see whether one has been lost", False)


def _ports(rows: Sequence[NodeRow]) -> Iterator[Stands]:
    """Interfaces that are down or slower on one node, and up and faster on all others, of which there are two."""
    if len(rows) < _LEAST_NODES:
        return
    for name in dict.fromkeys(nic.name for row in rows for nic in row.nics):
        have = {row.node: nic for row in rows for nic in row.nics if nic.name == name}
        if len(have) < len(rows):
            continue  # nodes of another kind
        down = [node for node, nic in have.items() if not nic.is_up]
        if len(down) == 1:
            (node,) = down
            yield Stands(
                node,
                f"node {node}: {name} ({have[node].kind}) is down, and up on the {len(rows) - 1} others; "
                "look at its cable and at the switch",
                True,
            )
        rates = {node: f"{nic.mbits}" for node, nic in have.items() if nic.is_up and nic.mbits > 0}
        usual, odd = unlike(rates)
        for node in odd:
            if usual and have[node].mbits < int(usual):
                yield Stands(
                    node,
                    f"node {node}: {name} ({have[node].kind}) runs at {have[node].mbits / 1000:g} Gb/s, at "
                    f"{int(usual) / 1000:g} on the others; look at its cable and at the switch",
                    False,
                )


def _paths(rows: Sequence[NodeRow]) -> Iterator[Stands]:
    for name in dict.fromkeys(one.path for row in rows for one in row.paths):
        for way in ("read", "write"):
            have = {
                row.node: speed
                for row in rows
                for one in row.paths
                if one.path == name and math.isfinite(speed := getattr(one, way)) and speed > 0
            }
            if len(have) < _LEAST_NODES:
                continue
            middle = sorted(have.values())[len(have) // 2]
            for node, speed in have.items():
                if speed < UNFIT_SHARE * middle:
                    yield Stands(
                        node,
                        f"node {node}: {way}s {name} at {speed / 1e6:.0f} MB/s, the median is {middle / 1e6:.0f}; "
                        "look at its way to the storage",
                        False,
                    )


def _counted(have: Mapping[str, str], node: str) -> str:
    """``2.27 on gpu-[1-2]``: what the other nodes have, the most frequent first."""
    others = Counter(value for value in have.values() if value != have[node])
    return ", ".join(
        f"{value} on {fold_nodes([one for one, its in have.items() if its == value])}"
        for value, _ in others.most_common(3)
    )


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
