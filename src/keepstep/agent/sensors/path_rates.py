"""What the node's workers lately sent on each network path, for those who look at the job: rates now and before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from keepstep.wire.messages import MOST_PATHS, PathRate

WINDOW_S = 10.0
_LEAST_BYTES = 1 << 16  # fewer bytes in a window show no rate
_MOST_KNOWN = 4096  # paths of which sums are kept

Sent = Mapping[tuple[str, str], tuple[int, float]]  # bytes and busy seconds by (source, target)


@dataclass(slots=True)
class _Path:
    bytes: float = 0.0  # in this window
    busy_s: float = 0.0
    retransmits: int = 0
    before_bytes: float = 0.0  # in all windows before it
    before_busy_s: float = 0.0


@dataclass(slots=True)
class PathRates:
    """Sums what was sent in windows of ten seconds."""

    over: Literal["TCP", "NCCL"]
    _paths: dict[tuple[str, str], _Path] = field(default_factory=dict[tuple[str, str], _Path])

    def add(self, sent: Sent, retransmits: Mapping[tuple[str, str], int] | None = None) -> None:
        """Add what was sent between two samples."""
        for ends, (nbytes, busy_s) in sent.items():
            path = self._paths.get(ends)
            if path is None:
                if len(self._paths) >= _MOST_KNOWN:
                    continue
                path = self._paths[ends] = _Path()
            path.bytes += nbytes
            path.busy_s += busy_s
        for ends, count in (retransmits or {}).items():
            if ends in self._paths:
                self._paths[ends].retransmits += count

    def close_window(self, seconds: float) -> list[PathRate]:
        """What was sent in the window that ends now, the busiest path first; ``seconds``: its length."""
        found: list[PathRate] = []
        for (source, target), path in self._paths.items():
            usual = path.before_bytes / path.before_busy_s if path.before_busy_s > 0 else 0.0
            lost = path.retransmits / seconds
            found.append(PathRate(source, target, self.over, path.bytes, path.busy_s, usual, lost))
            if path.bytes >= _LEAST_BYTES:
                path.before_bytes += path.bytes
                path.before_busy_s += path.busy_s
            path.bytes, path.busy_s, path.retransmits = 0.0, 0.0, 0
        return sorted(found, key=lambda one: -one.busy_s)


def chosen(rates: list[PathRate]) -> tuple[PathRate, ...]:
    """The busiest paths, and one of each address of the node, so that its addresses are known."""
    ordered = sorted(rates, key=lambda one: -one.busy_s)
    first_of = {one.source: place for place, one in reversed(list(enumerate(ordered)))}
    needed = sorted(first_of.values())[:MOST_PATHS]
    others = [place for place in range(len(ordered)) if place not in set(needed)]
    return tuple(ordered[place] for place in sorted(needed + others[: MOST_PATHS - len(needed)]))
