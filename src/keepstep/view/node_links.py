"""What nodes lately sent each other, from what each node's agent knows of its workers' connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from keepstep.core.regular_files import read_regular
from keepstep.view.run_snapshot import LinkRate, RankTable
from keepstep.wire.messages import PathRate

PATHS_FILE = "links.json"
_MOST_BYTES = 1 << 20
_LEAST_BYTES = 1 << 16  # fewer bytes show no rate

Paths = Mapping[int, Sequence[PathRate]]  # by node rank


class _File(msgspec.Struct):
    paths: tuple[PathRate, ...] = ()


def read_paths(path: Path) -> tuple[PathRate, ...]:
    """What an agent last wrote to ``nodes/N/links.json``.

    Raises OSError where it cannot be read, and msgspec.MsgspecError or UnicodeDecodeError where it tells of no links.
    """
    return msgspec.json.decode(read_regular(path, _MOST_BYTES), type=_File).paths


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
