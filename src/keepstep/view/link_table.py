"""What nodes lately sent each other, from what each node's agent knows of its workers' connections."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from keepstep.core.regular_files import read_regular
from keepstep.view.snapshot import LinkRate, RankTable
from keepstep.wire.messages import PathRate

PATHS_FILE = "links.json"
_MOST_BYTES = 1 << 20
_LEAST_BYTES = 1 << 16  # fewer bytes show no rate

Paths = Mapping[int, Sequence[PathRate]]  # by node rank


class _File(msgspec.Struct):
    paths: tuple[PathRate, ...] = ()


def read_paths(run: Path, troubles: list[str]) -> Paths:
    """What the agents last wrote to ``nodes/*/links.json``; ``troubles`` gets a line for each that is unreadable."""
    found: dict[int, Sequence[PathRate]] = {}
    for path in sorted(run.glob(f"nodes/*/{PATHS_FILE}")):
        if not re.fullmatch(r"\d{1,7}", path.parent.name, re.ASCII):
            continue
        try:
            content = msgspec.json.decode(read_regular(path, _MOST_BYTES), type=_File)
        except OSError as error:
            troubles.append(f"{path}: cannot be read: {error.strerror}")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            troubles.append(f"{path}: tells of no links: {error}")
        else:
            found[int(path.parent.name)] = content.paths
    return found


def links_between(paths: Paths, ranks: RankTable | None) -> tuple[LinkRate, ...]:
    """The rates between nodes. Whose address is whose follows from the nodes' own paths, and from ``ranks``."""
    home = {path.source: node for node, told in paths.items() for path in told if path.over == "TCP"}
    if ranks is not None and any(path.over == "NCCL" for told in paths.values() for path in told):
        home |= {
            f"rank:{rank}": node for rank, node in zip(ranks.rank.tolist(), ranks.node.tolist(), strict=True)
        }
    sums: dict[tuple[int, int], list[float]] = {}
    for node, told in paths.items():
        for path in told:
            target = home.get(path.target, node)
            if target == node or not (path.bytes >= _LEAST_BYTES and path.busy_s > 0):
                continue
            row = sums.setdefault((node, target), [0.0] * 5)
            for place, more in enumerate((path.bytes, path.busy_s, path.retransmits_per_s)):
                row[place] += more
            if path.usual_bytes_per_s > 0:
                row[3] += path.usual_bytes_per_s * path.busy_s
                row[4] += path.busy_s
    return tuple(
        LinkRate(*ends, row[0] / row[1], row[3] / row[4] if row[4] else 0.0, row[2])
        for ends, row in sorted(sums.items())
    )
