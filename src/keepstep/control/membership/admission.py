"""Whether the nodes of a job fit each other: their versions and clocks, as launchers tell them when they join."""

from __future__ import annotations

from collections.abc import Callable

from keepstep.wire.messages import Join

MOST_SKEW_S = 10.0  # with a larger skew logs, files on storage and certificates of two nodes would contradict


class Admission:
    """Compares each launcher with the first. ``unix_s``: Unix time of a moment on the controller's clock."""

    def __init__(self, unix_s: Callable[[float], float]) -> None:
        self._unix_s = unix_s
        self._first: Join | None = None
        self.found: dict[str, tuple[str, ...]] = {}  # problems that each node's checks found, by its name

    def objection(self, join: Join, now_s: float) -> str:
        """Why this launcher cannot take part; "": it can. One that has a place already is not asked."""
        if join.incarnation >= 0:
            return ""
        skew_s = join.unix_s - self._unix_s(now_s) if join.unix_s else 0.0
        if abs(skew_s) > MOST_SKEW_S:
            return (
                f"the clock of node {join.node} is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the "
                f"controller's, at most {MOST_SKEW_S:g} are allowed; set both by NTP (--no-check joins anyway)"
            )
        first = self._first
        if first is not None and first.versions and join.versions and first.versions != join.versions:
            here = ", ".join(sorted(set(join.versions) - set(first.versions)))
            there = ", ".join(sorted(set(first.versions) - set(join.versions)))
            return (
                f"node {join.node} has {here or 'less'}, {first.node} has {there or 'less'}; "
                "install the same on all nodes (--no-check joins anyway)"
            )
        if first is None or not first.versions:
            self._first = join
        self.found[join.node] = join.checks
        return ""
